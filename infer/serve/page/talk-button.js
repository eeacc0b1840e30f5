/**
 * The round button, by pointer, space bar or a screen reader's click.
 *
 * A long press talks while it lasts. A short press starts, and the next press ends. Where `isSwitch` is set (hands-free),
 * every press is a short one.
 */

const SHORT = 300; // milliseconds

export class TalkButton {
  constructor(element, { onBegin, onEnd }) {
    this.element = element;
    this.onBegin = onBegin;
    this.onEnd = onEnd;
    this.isSwitch = false;
    this.isOn = false;
    this.listen();
  }

  listen() {
    const { element } = this;
    element.addEventListener('pointerdown', (event) => {
      if (event.button !== 0) return;
      element.setPointerCapture(event.pointerId);
      this.press();
    });
    element.addEventListener('pointerup', () => this.release());
    element.addEventListener('pointercancel', () => this.release());
    element.addEventListener('contextmenu', (event) => event.preventDefault());
    element.addEventListener('click', (event) => {
      if (event.detail === 0) this.set(!this.isOn); // neither pointer nor key: assistive software
    });
    document.addEventListener('keydown', (event) => {
      if (!this.isMine(event)) return;
      event.preventDefault();
      if (!event.repeat) this.press();
    });
    document.addEventListener('keyup', (event) => {
      if (!this.isMine(event)) return;
      event.preventDefault();
      this.release();
    });
    window.addEventListener('blur', () => this.release());
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
