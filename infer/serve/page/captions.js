/**
 * The conversation as text: one article for each turn of either side, in a live log.
 *
 * An answer that was interrupted shows what was heard, and the rest struck through. A turn whose sound is complete can be
 * replayed and saved.
 */

const NAMES = { user: 'You', assistant: 'Omni' };
const OBJECTS = { user: 'what you said', assistant: 'the answer' };

class Turn {
  constructor(role, id, number, actions) {
    Object.assign(this, { role, number, text: '' });
    this.heard = null; // of an interrupted answer: the text that was heard
    this.sound = null; // Int16Array
    this.isPartial = false; // the text is what was understood while it was spoken
    this.element = element('article', `turn ${role}`);
    this.element.dataset.item = id;
    this.words = element('p', 'words');
    this.words.setAttribute('aria-busy', 'true'); // a screen reader waits for the whole text
    this.timings = element('span', 'timings');
    this.buttons = element('span', 'buttons');
    this.buttons.hidden = true;
    this.buttons.append(
      button('Replay', `Replay ${OBJECTS[role]}`, () => actions.replay(this)),
      button('Save', `Save ${OBJECTS[role]} as a WAV file`, () => actions.save(this)),
    );
    const foot = element('footer');
    foot.append(this.timings, this.buttons);
    this.element.append(element('h2', 'speaker', NAMES[role]), this.words, foot);
  }

  add(text) {
    this.show(this.isPartial ? text : this.text + text);
  }

  /** Show a text; one that is partial until the next takes its place. */
  show(text, isPartial = false) {
    this.words.classList.toggle('partial', isPartial);
    Object.assign(this, { text, isPartial });
    if (this.heard === null) this.words.textContent = text;
    else this.strike();
  }

  /** No more text comes; `otherwise` is shown where there was none. */
  finish(otherwise = '') {
    if (this.isPartial) this.show('');
    if (!this.text) this.words.replaceChildren(element('em', '', otherwise));
    this.words.setAttribute('aria-busy', 'false');
  }

  setHeard(text) {
    this.heard = text;
    this.strike();
  }

  /** Strike through what comes after the words that were heard. */
  strike() {
    const rest = this.text.slice(commonLength(this.heard, this.text));
    this.words.replaceChildren(this.text.slice(0, this.text.length - rest.length));
    if (rest) this.words.append(element('span', 'visually-hidden', ' Not heard: '), element('del', '', rest));
  }

  setSound(samples) {
    this.sound = samples;
    this.buttons.hidden = samples.length === 0;
  }

  /** Latencies in milliseconds; what is not known is left out. */
  setTimings({ firstAudio, serverFirstAudio, endpointing }) {
    const parts = [
      ['first audio', firstAudio],
      ['on the server', serverFirstAudio],
      ['endpointing', endpointing],
    ];
    const known = parts.filter(([, value]) => Number.isFinite(value));
    this.timings.textContent = known.map(([name, value]) => `${name} ${Math.round(value)} ms`).join(' · ');
  }
}

export class Captions {
  /** `actions`: {replay(turn), save(turn)}. */
  constructor(log, actions) {
    Object.assign(this, { log, actions, turns: new Map(), count: 0 });
  }

  add(role, id) {
    const turn = new Turn(role, id, ++this.count, this.actions);
    this.turns.set(id, turn);
    this.append(turn.element);
    return turn;
  }

  get(id) {
    return this.turns.get(id);
  }

  /** Change a turn, and keep the newest line in sight where it was. */
  change(id, update) {
    const turn = this.turns.get(id);
    if (turn) this.keepInSight(() => update(turn));
  }

  /** Take a turn away that was none. */
  remove(id) {
    this.turns.get(id)?.element.remove();
    this.turns.delete(id);
  }

  /** A line between turns, as after a lost connection; the turns before it get no more text. */
  divide(text) {
    if (this.turns.size === 0) return;
    this.append(element('p', 'divider', text));
    this.turns.clear();
  }

  append(child) {
    this.keepInSight(() => this.log.append(child));
  }

  keepInSight(change) {
    const { log } = this;
    const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
    change();
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  }
}

function commonLength(a, b) {
  let length = 0;
  while (length < a.length && a[length] === b[length]) length++;
  return length;
}

function element(name, className = '', text = '') {
  const node = document.createElement(name);
  if (className) node.className = className;
  node.textContent = text;
  return node;
}

function button(text, label, onClick) {
  const node = element('button', 'quiet', text);
  node.type = 'button';
  node.setAttribute('aria-label', label);
  node.addEventListener('click', onClick);
  return node;
}
