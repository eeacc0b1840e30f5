/**
 * The page's sound: one AudioContext at 24 kHz, the microphone and the player.
 *
 *      microphone -> analyser -> capture worklet -> pieces of 40 ms
 *      playback worklet -> gain (ducking) -> analyser -> speaker
 */

import { RATE } from './pcm.js';

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
  await Promise.all([
    context.audioWorklet.addModule('/page/capture-worklet.js'),
    context.audioWorklet.addModule('/page/playback-worklet.js'),
  ]);
  if (speaker && context.setSinkId) await context.setSinkId(speaker).catch(() => {}); // unplugged: the default one stays
  return context;
}

export class Microphone {
  /** `onPiece` gets every Int16Array of 40 ms; `onLost` is called where the device goes away. */
  constructor({ onPiece, onLost }) {
    this.onPiece = onPiece;
    this.onLost = onLost;
    this.stream = null;
    this.analyser = null;
    this.opening = null; // promise, while the browser asks
    this.isMuted = false;
  }

  get isOpen() {
    return this.stream !== null;
  }

  /** Error, with a message for people, where there is no microphone to be had. */
  async open(context, device) {
    if (this.isOpen) return;
    this.opening ??= this.ask(context, device).finally(() => {
      this.opening = null;
    });
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
    const [track] = this.stream.getAudioTracks();
    track.enabled = !this.isMuted;
    track.onended = () => {
      this.close();
      this.onLost();
    };
  }

  connect(context) {
    this.source = context.createMediaStreamSource(this.stream);
    this.analyser = new AnalyserNode(context, { fftSize: 1024 });
    this.worklet = new AudioWorkletNode(context, 'capture', {
      numberOfOutputs: 0,
      channelCount: 1,
      channelCountMode: 'explicit',
    });
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
    this.stream?.getAudioTracks().forEach((track) => {
      track.enabled = !muted;
    });
  }
}

export class Player {
  /**
   * onStart(item, time): it is heard from that time on, in milliseconds of performance.now()
   * onFinish(item): it was played to its end
   * onStop(item, heard): it was stopped after that many samples
   */
  constructor({ onStart, onFinish, onStop }) {
    this.onStart = onStart;
    this.onFinish = onFinish;
    this.onStop = onStop;
    this.items = new Map(); // samples played of each item that is not finished
    this.stops = []; // promises of stops under way
    this.underruns = 0;
    this.context = this.analyser = null;
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
    if (!this.has(item)) this.items.set(item, 0);
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

  progress({ item, played }) {
    if (this.has(item)) this.items.set(item, played);
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
