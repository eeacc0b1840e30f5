/**
 * What of the microphone goes to the server, and the record of it from which a turn's sound is cut.
 *
 * Hands-free, every piece is sent and the server finds the turns. Otherwise only what is said while the button is held is
 * sent, with the pieces just before it; one more piece comes after the release, since sound takes some time to get here.
 */

import { RATE, joined, toBase64, toMilliseconds, toSamples } from './pcm.js';

const PIECES_BEFORE = 5; // of 40 ms, sent with a held turn
const SHORTEST = 0.2; // seconds of a held turn
const RECORDED = 180; // seconds

export class VoiceInput {
  /** `onTurn({start, end})`: a held turn was committed; milliseconds of all that was sent. */
  constructor({ send, onTurn, onNotice }) {
    this.send = send;
    this.onTurn = onTurn;
    this.onNotice = onNotice;
    this.handsFree = false;
    this.isActive = false; // held, or hands-free
    this.longest = Infinity; // seconds of a held turn, with the pieces before it
    this.before = [];
    this.reset();
  }

  /** A new session counts its milliseconds from 0. */
  reset() {
    this.record = [];
    this.recorded = 0; // samples in the record
    this.sent = 0; // samples
    this.isActive = false;
    this.isReleased = false;
  }

  begin() {
    this.isActive = true;
    this.isReleased = false;
    if (this.handsFree) return;
    this.send({ type: 'input_audio_buffer.clear' });
    this.start = this.sent;
    this.before.splice(0).forEach((piece) => this.append(piece));
    this.pressed = this.sent;
  }

  end() {
    this.isReleased = this.isActive;
    if (!this.isActive || !this.handsFree) return;
    this.isActive = false;
    this.send({ type: 'input_audio_buffer.clear' }); // a turn that has begun is dropped
  }

  /** Take a piece of the microphone's sound. */
  take(piece) {
    if (this.isActive) {
      this.append(piece);
      if (!this.handsFree) this.commitWhole();
    } else {
      this.before.push(piece);
      if (this.before.length > PIECES_BEFORE) this.before.shift();
    }
  }

  /** Commit a held turn that was released, or is as long as one may be. */
  commitWhole() {
    const isFull = (this.sent - this.start) / RATE > this.longest;
    if (!this.isReleased && !isFull) return;
    this.commit((this.sent - this.pressed) / RATE);
    if (isFull) this.onNotice(`A turn takes at most ${Math.floor(this.longest)} seconds. It was sent.`);
  }

  append(piece) {
    this.send({ type: 'input_audio_buffer.append', audio: toBase64(piece) });
    this.sent += piece.length;
    this.record.push(piece);
    this.recorded += piece.length;
    while (this.recorded > RECORDED * RATE) this.recorded -= this.record.shift().length;
  }

  commit(seconds) {
    this.isActive = this.isReleased = false;
    if (seconds < SHORTEST) {
      this.send({ type: 'input_audio_buffer.clear' });
      this.onNotice('Hold the button for as long as you speak.');
      return;
    }
    this.send({ type: 'input_audio_buffer.commit' });
    this.onTurn({ start: toMilliseconds(this.start), end: toMilliseconds(this.sent) });
  }

  /** Samples sent between two times in milliseconds, as far as they are still recorded. */
  cut({ start, end }) {
    const first = this.sent - this.recorded;
    return joined(this.record).slice(Math.max(0, toSamples(start) - first), Math.max(0, toSamples(end) - first));
  }
}
