/**
 * The round button, and what of the microphone goes to the server, with the record from which a turn's sound is cut.
 *
 * A long press talks while it lasts. A short press starts, and the next press ends. Hands-free, every press is a short one,
 * every piece is sent and the server finds the turns. Otherwise only what is said while the button is held is sent, with the
 * pieces just before it; one more piece comes after the release, since sound takes some time to get here.
 */

import { RATE, joined, toBase64, toMilliseconds, toSamples } from './audio.js';

const SHORT = 300; // milliseconds

export class TalkButton {
  constructor(element, { onBegin, onEnd }) {
    Object.assign(this, { element, onBegin, onEnd, isSwitch: false, isOn: false });
    const release = () => this.release();
    const onKey = (act) => (event) => {
      if (!this.isMine(event)) return;
      event.preventDefault();
      if (!event.repeat) act();
    };
    element.addEventListener('pointerdown', (event) => {
      if (event.button !== 0) return;
      element.setPointerCapture(event.pointerId);
      this.press();
    });
    element.addEventListener('pointerup', release);
    element.addEventListener('pointercancel', release);
    element.addEventListener('contextmenu', (event) => event.preventDefault());
    element.addEventListener('click', (event) => {
      if (event.detail === 0) this.set(!this.isOn); // neither pointer nor key: assistive software
    });
    document.addEventListener('keydown', onKey(() => this.press()));
    document.addEventListener('keyup', onKey(release));
    window.addEventListener('blur', release);
  }

  /** The space bar is the button's wherever it does nothing else. */
  isMine(event) {
    if (event.target === this.element) return event.key === ' ' || event.key === 'Enter';
    return event.key === ' ' && !event.target.closest('input, select, button, dialog');
  }

  press() {
    this.pressedAt = performance.now();
    this.set(!this.isOn);
  }

  release() {
    if (this.isOn && !this.isSwitch && performance.now() - this.pressedAt > SHORT) this.set(false);
  }

  set(isOn) {
    if (isOn === this.isOn) return;
    this.isOn = isOn;
    this.element.setAttribute('aria-pressed', String(isOn));
    if (isOn) this.onBegin();
    else this.onEnd();
  }
}

const PIECES_BEFORE = 5; // of 40 ms, sent with a held turn
const SHORTEST = 0.2; // seconds of a held turn
const RECORDED = 180; // seconds

export class VoiceInput {
  /** `onTurn({start, end})`: a held turn was committed; milliseconds of all that was sent. */
  constructor({ send, onTurn, onNotice }) {
    Object.assign(this, { send, onTurn, onNotice, handsFree: false });
    this.longest = Infinity; // seconds of a held turn, with the pieces before it
    this.before = [];
    this.reset();
  }

  /** A new session counts its milliseconds from 0. */
  reset() {
    this.record = [];
    this.recorded = 0; // samples in the record
    this.sent = 0; // samples
    this.isActive = false; // held, or hands-free
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
