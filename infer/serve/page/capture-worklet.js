/**
 * Cuts the microphone's sound into pieces of 40 ms, int16, at the context's rate of 24 kHz.
 *
 * out: each piece, an Int16Array
 * in: anything: the microphone was closed
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
