/**
 * Cuts the microphone's sound into pieces of 40 ms, and plays items of sound that is still arriving, without clicks.
 *
 * capture, at the context's rate of 24 kHz
 * out: each piece, an Int16Array
 * in:  anything: the microphone was closed
 *
 * playback
 * in:  {type: 'samples', item, samples: Int16Array}, {type: 'end', item} (no more of it comes), {type: 'stop'} (all items)
 * out: {type: 'started' | 'finished' | 'underrun', item}, and for a stop, after its fade, {type: 'stopped', items: [{item, played}]},
 *      where `played` counts samples
 *
 * An item begins when as many samples are held as the jitter buffer asks for. Where they run out before the end, it waits
 * again, for more: the buffer grows by a step with each underrun and shrinks slowly while there is none.
 *
 * The gain rises over FADE samples, and is never above what lets it reach 0 with the last sample that is held. So neither an
 * underrun nor an item's end jumps, and where more samples come in time the gain only dips.
 *
 *      gain 1      ___________           _____
 *                 /           \         /
 *           0  __/             \_______/          held samples run out, and come again
 */

const PIECE = 960;

class Capture extends AudioWorkletProcessor {
  constructor() {
    super();
    this.open = true;
    this.piece = new Int16Array(PIECE);
    this.filled = 0;
    this.port.onmessage = () => {
      this.open = false;
    };
  }

  process([[channel]]) {
    for (const sample of channel ?? []) {
      this.piece[this.filled++] = Math.round(Math.max(-1, Math.min(1, sample)) * 32767);
      if (this.filled === PIECE) this.post();
    }
    return this.open;
  }

  post() {
    this.port.postMessage(this.piece, [this.piece.buffer]);
    this.piece = new Int16Array(PIECE);
    this.filled = 0;
  }
}

registerProcessor('capture', Capture);

const MILLISECOND = sampleRate / 1000;
const FADE = Math.round(5 * MILLISECOND);
const STOP_FADE = Math.round(10 * MILLISECOND);
const LEAST_HELD = 80 * MILLISECOND;
const MOST_HELD = 400 * MILLISECOND;
const GROWTH = 40 * MILLISECOND;
const SHRINKAGE = 20 * MILLISECOND;
const SMOOTH = 15000 * MILLISECOND; // play without underrun after which the buffer shrinks

class Item {
  constructor(id) {
    this.id = id;
    this.pieces = [];
    this.offset = 0; // in the first piece
    this.held = 0;
    this.played = 0;
    this.ended = false;
    this.starved = false; // ran out of samples before its end
    this.stopping = false;
  }

  add(samples) {
    this.pieces.push(samples);
    this.held += samples.length;
  }

  next() {
    while (this.offset === this.pieces[0].length) {
      this.pieces.shift();
      this.offset = 0;
    }
    this.held--;
    this.played++;
    return this.pieces[0][this.offset++] / 32768;
  }
}

class Playback extends AudioWorkletProcessor {
  constructor() {
    super();
    this.items = [];
    this.sounding = false;
    this.gain = 0;
    this.wanted = LEAST_HELD; // samples held before an item begins
    this.smooth = 0; // samples played since the last change of it
    this.stopped = []; // items that a stop dropped and that are not reported yet
    this.port.onmessage = ({ data }) => this[data.type](data);
  }

  samples({ item: id, samples }) {
    const item = this.find(id);
    if (item.starved) this.grow(item);
    item.add(samples);
  }

  end({ item: id }) {
    this.find(id).ended = true;
  }

  stop() {
    this.stopped.push(...this.items.splice(this.sounding ? 1 : 0));
    if (this.sounding) this.items[0].stopping = true;
    else this.reportStopped();
  }

  find(id) {
    const known = this.items.find((item) => item.id === id && !item.stopping);
    if (known) return known;
    const item = new Item(id);
    this.items.push(item);
    return item;
  }

  process(inputs, [[channel]]) {
    for (let i = 0; i < channel.length; i++) channel[i] = this.nextSample();
    return true;
  }

  nextSample() {
    const item = this.items[0];
    if (!item) return 0;
    if (!this.sounding && !this.begin(item)) return 0;
    const change = item.stopping ? -1 / STOP_FADE : 1 / FADE;
    this.gain = Math.max(0, Math.min(1, this.gain + change, (item.held - 1) / FADE));
    const sample = item.next() * this.gain;
    this.count();
    if (item.stopping ? this.gain === 0 : item.held === 0) this.pause(item);
    return sample;
  }

  /** Whether the first item has enough to begin, or to go on. */
  begin(item) {
    if (item.ended && item.held === 0) this.pause(item);
    else if (item.ended || item.held >= this.wanted) {
      if (item.played === 0) this.report('started', { item: item.id });
      this.sounding = true;
      this.gain = 0;
    }
    return this.sounding;
  }

  /** The first item has no more to play, for now or for good. */
  pause(item) {
    this.sounding = false;
    if (!item.ended && !item.stopping) {
      item.starved = true;
      return;
    }
    this.items.shift();
    if (item.stopping) {
      this.stopped.push(item);
      this.reportStopped();
    } else {
      this.report('finished', { item: item.id });
    }
  }

  reportStopped() {
    this.report('stopped', { items: this.stopped.map(({ id, played }) => ({ item: id, played })) });
    this.stopped = [];
  }

  /** Count a sample that was played without underrun. */
  count() {
    if (++this.smooth < SMOOTH) return;
    this.smooth = 0;
    this.wanted = Math.max(LEAST_HELD, this.wanted - SHRINKAGE);
  }

  grow(item) {
    item.starved = false;
    this.smooth = 0;
    this.wanted = Math.min(MOST_HELD, this.wanted + GROWTH);
    this.report('underrun', { item: item.id });
  }

  report(type, values) {
    this.port.postMessage({ type, ...values });
  }
}

registerProcessor('playback', Playback);
