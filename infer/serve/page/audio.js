/**
 * The page's sound: PCM as the Realtime protocol carries it (int16, mono, 24 kHz, in base64), one AudioContext, the microphone,
 * the player, and their levels as rows of bars.
 *
 *      microphone -> analyser -> capture worklet -> pieces of 40 ms
 *      playback worklet -> gain (ducking) -> analyser -> speaker
 */

export const RATE = 24000;

/** Int16Array to base64. Its bytes are little-endian, as those of every browser's typed arrays. */
export function toBase64(samples) {
  const bytes = new Uint8Array(samples.buffer, samples.byteOffset, samples.byteLength);
  return btoa(String.fromCharCode(...bytes));
}

/** Base64 to Int16Array. */
export function fromBase64(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  return new Int16Array(bytes.buffer, 0, bytes.length >> 1);
}

/** One Int16Array of several. */
export function joined(pieces) {
  const whole = new Int16Array(pieces.reduce((length, piece) => length + piece.length, 0));
  let offset = 0;
  for (const piece of pieces) {
    whole.set(piece, offset);
    offset += piece.length;
  }
  return whole;
}

export function toSamples(milliseconds) {
  return Math.round((milliseconds * RATE) / 1000);
}

export function toMilliseconds(samples) {
  return Math.floor((samples * 1000) / RATE);
}

/** A WAV file (RIFF, format 1 = PCM, one channel of 16 bits) as a Blob; its header as little-endian words of 32 bits. */
export function toWav(samples) {
  const [riff, wave, fmt, data] = [0x46464952, 0x45564157, 0x20746d66, 0x61746164];
  const format = [0x1_0001, RATE, RATE * 2, 0x10_0002]; // one channel, PCM; samples and bytes per second; bits and bytes of one
  const header = [riff, 36 + samples.byteLength, wave, fmt, 16, ...format, data, samples.byteLength];
  return new Blob([new Uint32Array(header), samples], { type: 'audio/wav' });
}

const DUCKED_GAIN = 0.2;
const DUCKING_SECONDS = 0.02;

const NOT_SECURE = 'The browser gives no microphone to pages that are not on https or localhost. Typing works.';

const MICROPHONE_TROUBLE = {
  NotAllowedError: 'The microphone was refused. Allow it in the browser’s settings for this page, or type instead.',
  NotFoundError: 'No microphone was found. Connect one, or type instead.',
  NotReadableError: 'The microphone is in use by another program. Close that, or type instead.',
  NotSupportedError: 'This browser cannot record at 24 kHz. Use a newer one, or type instead.',
};

export const canRecord = () => Boolean(navigator.mediaDevices?.getUserMedia);

/** A running context with both worklets. Call it from a click or a key, so that the browser lets it sound. */
export async function openContext(speaker) {
  const context = new AudioContext({ sampleRate: RATE, latencyHint: 'interactive' });
  await context.audioWorklet.addModule('/page/worklets.js');
  if (speaker && context.setSinkId) await context.setSinkId(speaker).catch(() => {}); // unplugged: the default one stays
  return context;
}

export class Microphone {
  /** `onPiece` gets every Int16Array of 40 ms; `onLost` is called where the device goes away. */
  constructor({ onPiece, onLost }) {
    Object.assign(this, { onPiece, onLost, stream: null, analyser: null, isMuted: false });
    this.opening = null; // promise, while the browser asks
  }

  /** Error, with a message for people, where there is no microphone to be had. */
  async open(context, device) {
    if (this.stream) return;
    this.opening ??= this.ask(context, device).finally(() => (this.opening = null));
    await this.opening;
  }

  async ask(context, device) {
    if (!canRecord()) throw new Error(NOT_SECURE);
    try {
      this.stream = await navigator.mediaDevices.getUserMedia({
        audio: {
          channelCount: 1,
          echoCancellation: true,
          noiseSuppression: true,
          autoGainControl: true,
          ...(device && { deviceId: device }),
        },
      });
      this.connect(context);
    } catch (error) {
      this.close();
      throw new Error(MICROPHONE_TROUBLE[error.name] ?? `The microphone cannot be used (${error.message}). Typing works.`);
    }
    this.mute(this.isMuted);
    this.stream.getAudioTracks()[0].onended = () => {
      this.close();
      this.onLost();
    };
  }

  connect(context) {
    this.source = context.createMediaStreamSource(this.stream);
    this.analyser = new AnalyserNode(context, { fftSize: 1024 });
    this.worklet = new AudioWorkletNode(context, 'capture', { numberOfOutputs: 0, channelCount: 1, channelCountMode: 'explicit' });
    this.worklet.port.onmessage = ({ data }) => this.onPiece(data);
    this.source.connect(this.analyser).connect(this.worklet);
  }

  close() {
    this.stream?.getTracks().forEach((track) => track.stop());
    this.source?.disconnect();
    this.analyser?.disconnect();
    this.worklet?.port.postMessage('close');
    this.stream = this.source = this.analyser = this.worklet = null;
  }

  mute(muted) {
    this.isMuted = muted;
    this.stream?.getAudioTracks().forEach((track) => (track.enabled = !muted));
  }
}

export class Player {
  /**
   * onStart(item, time): it is heard from that time on, in milliseconds of performance.now()
   * onFinish(item): it was played to its end
   * onStop(item, heard): it was stopped after that many samples
   */
  constructor({ onStart, onFinish, onStop }) {
    Object.assign(this, { onStart, onFinish, onStop, context: null, analyser: null, underruns: 0 });
    this.items = new Set(); // that are not finished
    this.stops = []; // promises of stops under way
  }

  open(context) {
    this.context = context;
    this.worklet = new AudioWorkletNode(context, 'playback', { numberOfInputs: 0, outputChannelCount: [1] });
    this.worklet.port.onmessage = ({ data }) => this[data.type](data);
    this.gain = new GainNode(context);
    this.analyser = new AnalyserNode(context, { fftSize: 1024 });
    this.worklet.connect(this.gain).connect(this.analyser).connect(context.destination);
  }

  has(item) {
    return this.items.has(item);
  }

  /** Queue an Int16Array of an item; it is not heard where the browser plays no sound. */
  add(item, samples) {
    if (this.context?.state !== 'running') return;
    this.items.add(item);
    this.worklet.port.postMessage({ type: 'samples', item, samples });
  }

  /** No more samples of the item come. */
  end(item) {
    if (this.has(item)) this.worklet.port.postMessage({ type: 'end', item });
  }

  /** Stop all items with a short fade; resolves when `onStop` was given what was heard of each. */
  stop() {
    if (this.items.size === 0 && this.stops.length === 0) return Promise.resolve();
    this.items.clear();
    this.worklet.port.postMessage({ type: 'stop' });
    return new Promise((resolve) => this.stops.push(resolve));
  }

  /** Lower the volume while somebody else may be speaking. */
  duck(active) {
    if (!this.gain) return;
    const { gain } = this.gain;
    const now = this.context.currentTime;
    gain.cancelScheduledValues(now);
    gain.setValueAtTime(gain.value, now);
    gain.linearRampToValueAtTime(active ? DUCKED_GAIN : 1, now + DUCKING_SECONDS);
  }

  /** Seconds that sound takes from the worklet to the speaker, where the browser knows. */
  get latency() {
    return this.context.outputLatency || 0;
  }

  started({ item }) {
    this.onStart(item, performance.now() + this.latency * 1000);
  }

  finished({ item }) {
    if (this.items.delete(item)) this.onFinish(item);
  }

  stopped({ items }) {
    const underway = this.latency * RATE;
    for (const { item, played } of items) this.onStop(item, Math.max(0, Math.round(played - underway)));
    this.stops.splice(0).forEach((resolve) => resolve());
  }

  underrun() {
    this.underruns++;
  }
}

const BAR = 3; // CSS pixels, and as many between bars
const BAR_MILLISECONDS = 50;
const LOUD = 0.25; // root mean square of a full bar

export class Meter {
  /** `analyser()` gives an AnalyserNode, or null while there is no sound; `direction` is -1 for bars that move to the left. */
  constructor(canvas, direction, analyser) {
    Object.assign(this, { canvas, direction, analyser, levels: [], level: 0 });
    this.samples = new Float32Array(1024);
    new ResizeObserver(() => this.resize()).observe(canvas);
  }

  resize() {
    const { canvas } = this;
    canvas.width = canvas.clientWidth * devicePixelRatio;
    canvas.height = canvas.clientHeight * devicePixelRatio;
    this.bars = Math.floor(canvas.clientWidth / (2 * BAR));
    this.levels = new Array(this.bars).fill(0);
    this.draw();
  }

  /** Measure, and draw where there is something new. */
  step(isStill) {
    const analyser = this.analyser();
    this.level = analyser ? this.measure(analyser) : 0;
    const wasQuiet = !this.levels.some(Boolean);
    this.levels = isStill ? [this.level] : [this.level, ...this.levels].slice(0, this.bars);
    if (this.level || !wasQuiet) this.draw();
  }

  measure(analyser) {
    analyser.getFloatTimeDomainData(this.samples);
    const power = this.samples.reduce((sum, sample) => sum + sample * sample, 0) / this.samples.length;
    return Math.min(1, Math.sqrt(Math.sqrt(power) / LOUD));
  }

  draw() {
    const { canvas, levels, direction } = this;
    const context = canvas.getContext('2d');
    const width = canvas.clientWidth;
    const middle = canvas.clientHeight / 2;
    context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    context.clearRect(0, 0, width, canvas.clientHeight);
    context.fillStyle = getComputedStyle(canvas).color;
    levels.forEach((level, i) => {
      const half = Math.max(BAR / 2, level * middle);
      const x = i * 2 * BAR;
      context.globalAlpha = 1 - (0.85 * i) / this.bars;
      context.beginPath();
      context.roundRect(direction < 0 ? width - x - BAR : x, middle - half, BAR, 2 * half, BAR / 2);
      context.fill();
    });
  }
}

/** Step the meters as long as the page is seen; `onLevel` gets the louder one's level, 0 to 1. */
export function run(meters, onLevel) {
  const reduced = matchMedia('(prefers-reduced-motion: reduce)');
  let last = 0;
  const frame = (now) => {
    requestAnimationFrame(frame);
    if (now - last < BAR_MILLISECONDS) return;
    last = now;
    meters.forEach((meter) => meter.step(reduced.matches));
    onLevel(reduced.matches ? 0 : Math.max(...meters.map(({ level }) => level)));
  };
  requestAnimationFrame(frame);
}
