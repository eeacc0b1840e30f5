/**
 * The WebSocket to the server, opened again by itself where it is lost or the server is full.
 *
 * onStatus gets {name, attempt, reason}:
 *      connecting    attempt 1, 2, ...
 *      open          the server has sent session.created
 *      waiting       for the next attempt; `reason` is 'full', 'lost', or what the server said
 *      ended         the server has ended the session regularly, as one in which nothing happens; `ready()` begins another
 *      key           a key is needed (reason 'needed') or was refused ('refused'); `open(key)` goes on
 */

const REGULAR = 1000; // close codes of WebSockets
const TRY_LATER = 1013;
const FIRST_WAIT = 500; // milliseconds
const FULL_WAIT = 3000;
const LONGEST_WAIT = 10000;
const KEY = /^[!#$%&'*+.^_`|~\w-]+$/; // a subprotocol is a token (RFC 6455, 4.1)
const KEY_CODES = { missing_api_key: 'needed', invalid_api_key: 'refused' };

export class Connection {
  constructor({ needsKey, onEvent, onStatus }) {
    Object.assign(this, { needsKey, onEvent, onStatus, isOpen: false });
    this.waiting = []; // resolve functions of `ready()`
    window.addEventListener('online', () => this.timer && this.connect());
  }

  open(key = '') {
    this.key = key;
    this.attempt = 0;
    if (this.needsKey && !key) this.report('key', 'needed');
    else if (key && !KEY.test(key)) this.report('key', 'refused');
    else this.connect();
  }

  /** Resolves to whether there is a connection, after another attempt where there is none and nothing stands in its way. */
  ready() {
    if (this.isOpen || this.status === 'key') return Promise.resolve(this.isOpen);
    if (this.status !== 'connecting') this.connect();
    return new Promise((resolve) => this.waiting.push(resolve));
  }

  connect() {
    clearTimeout(this.timer);
    this.timer = null;
    this.attempt++;
    this.refusal = null;
    this.report('connecting');
    const protocols = this.key ? ['realtime', `openai-insecure-api-key.${this.key}`] : ['realtime'];
    const scheme = location.protocol === 'https:' ? 'wss' : 'ws';
    this.socket = new WebSocket(`${scheme}://${location.host}/v1/realtime?omni=1`, protocols);
    this.socket.onmessage = ({ data }) => this.receive(JSON.parse(data));
    this.socket.onclose = ({ code }) => this.closed(code);
  }

  /** Send an event; one that finds no connection is dropped. */
  send(event) {
    if (this.isOpen) this.socket.send(JSON.stringify(event));
  }

  receive(event) {
    if (event.type === 'session.created') {
      this.isOpen = true;
      this.attempt = 0;
      this.report('open');
    }
    if (event.type === 'error' && !this.isOpen) this.refusal = event.error;
    else this.onEvent(event);
  }

  closed(code) {
    const { refusal } = this;
    this.isOpen = false;
    if (refusal?.code in KEY_CODES) this.report('key', KEY_CODES[refusal.code]);
    else if (refusal?.code === 'session_limit_reached' || (code === TRY_LATER && !refusal)) this.retry('full', FULL_WAIT);
    else if (refusal) this.retry(refusal.message, LONGEST_WAIT);
    else if (code === REGULAR) this.report('ended');
    else this.retry('lost', Math.min(LONGEST_WAIT, FIRST_WAIT * 2 ** this.attempt));
  }

  retry(reason, wait) {
    this.timer = setTimeout(() => this.connect(), wait);
    this.report('waiting', reason);
  }

  report(name, reason) {
    this.status = name;
    this.onStatus({ name, reason, attempt: this.attempt });
    if (name !== 'connecting') this.waiting.splice(0).forEach((resolve) => resolve(this.isOpen));
  }
}
