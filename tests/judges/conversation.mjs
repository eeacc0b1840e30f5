// What the judges in JavaScript share, in Node and in a page: sound in real time, and the conversation that each of them holds.
// As in judging.py: every answer is heard out, but one, which the last question but one interrupts.

export const RATE = 24000;
const PIECE = 480; // samples of 20 ms
const BEGIN = 15; // longest wait for an answer's first sound, and for the end of an answer, in seconds
const HEARD = 0.3; // of an answer before it is interrupted
const PAUSE = 1; // between an answer and the next question

const now = () => performance.now() / 1000;
export const sleep = (seconds) => new Promise((resolve) => setTimeout(resolve, Math.max(0, seconds * 1000)));

// Samples (Int16Array) of a WAV file of 24 kHz, mono, 16 bits.
export function samplesOf(wav) {
  const view = new DataView(wav);
  const [channels, rate, bits] = [view.getUint16(22, true), view.getUint32(24, true), view.getUint16(34, true)];
  if (channels !== 1 || rate !== RATE || bits !== 16) throw new Error(`expected ${RATE} Hz, mono, 16 bits`);
  let at = 12;
  while (view.getUint32(at) !== 0x64617461) at += 8 + view.getUint32(at + 4, true); // "data"
  return new Int16Array(wav.slice(at + 8, at + 8 + view.getUint32(at + 4, true)));
}

// Plays to nobody, in real time and without gaps.
class Loudspeaker {
  #end = 0;

  play(seconds) {
    this.#end = Math.max(this.#end, now()) + seconds;
  }

  get left() {
    return Math.max(0, this.#end - now());
  }

  stop() {
    this.#end = 0;
  }
}

// Sends what is said, and silence while nothing is: a piece every 20 ms, until it is closed.
export class Microphone {
  #said = [];
  #open = true;

  constructor(send) {
    this.send = send;
  }

  async run() {
    const began = now();
    for (let count = 1; this.#open; count++) {
      this.send((this.#said.shift() ?? new Int16Array(PIECE)).buffer);
      await sleep(began + count * 0.02 - now());
    }
  }

  async say(samples) {
    for (let at = 0; at < samples.length; at += PIECE) {
      const piece = new Int16Array(PIECE);
      piece.set(samples.subarray(at, at + PIECE));
      this.#said.push(piece);
    }
    while (this.#said.length) await sleep(0.01);
  }

  close() {
    this.#open = false;
  }
}

export class Conversation {
  turns = [];
  errors = [];
  history = [];
  loudspeaker = new Loudspeaker();
  #answering = {};
  #over = false; // the judge closed the connection
  #lost = false; // somebody else did

  constructor(client, version) {
    Object.assign(this, { client, version });
  }

  began() {
    this.#answering = this.turns.at(-1) ?? {};
  }

  sounded(seconds, played = false) {
    this.#answering.audio_seconds += seconds;
    if (!played) this.loudspeaker.play(seconds);
  }

  wrote(text) {
    this.#answering.transcript += text;
  }

  ended() {
    this.#answering.ended = true;
  }

  stopped() {
    if (this.loudspeaker.left) this.interrupted();
    this.loudspeaker.stop();
  }

  interrupted() {
    this.#answering.interrupted = true;
  }

  // What was understood of the first question of which nothing is known yet.
  understood(text) {
    (this.turns.find((turn) => !turn.user_transcript) ?? this.turns.at(-1)).user_transcript += text;
  }

  failed(error) {
    const shown = error?.error ?? error;
    this.errors.push(typeof shown === 'string' ? shown : (shown?.stack ?? shown?.message ?? JSON.stringify(shown)));
  }

  // Follow what every session tells, whatever its transport is.
  follow(session) {
    session.on('error', (error) => this.failed(error));
    session.on('history_updated', (history) => {
      const messages = history.filter((item) => item.type === 'message');
      const text = (part) => part.transcript ?? part.text ?? '';
      this.history = messages.map((item) => ({ role: item.role, text: item.content.map(text).join(' ') }));
    });
    session.transport.on('connection_change', (status) => {
      this.#lost = status === 'disconnected' && !this.#over;
    });
    let untaken = null; // the SDK tells an event under its own name after '*', unless its schema refused it
    const types = new Set();
    session.transport.on('*', (event) => {
      if (untaken) this.failed(`dropped by the SDK: ${JSON.stringify(untaken)}`);
      untaken = event;
      if (!types.has(event.type)) session.transport.on(event.type, () => (untaken = null));
      types.add(event.type);
    });
    session.transport.on('turn_started', () => this.began());
    session.transport.on('audio_transcript_delta', (event) => this.wrote(event.delta));
    session.on('transport_event', (event) => {
      if (event.type === 'conversation.item.input_audio_transcription.completed') this.understood(event.transcript);
    });
  }

  close(session) {
    this.#over = true;
    session.close();
  }

  // Converse over a WebSocket: the application plays the sound, and stops when the session says so.
  async talk(session, questions) {
    session.on('audio', (event) => this.sounded(event.data.byteLength / 2 / RATE));
    session.on('audio_interrupted', () => this.stopped());
    session.transport.on('turn_done', () => this.ended());
    const microphone = new Microphone((piece) => session.sendAudio(piece));
    const running = microphone.run();
    await Promise.race([running, this.hold((samples) => microphone.say(samples), questions)]);
    microphone.close();
    await running;
  }

  // Ask every question ({name, samples}); the last but one interrupts the answer before it.
  async hold(say, questions) {
    for (const [number, { name, samples }] of questions.entries()) {
      const turn = { question: name, transcript: '', audio_seconds: 0, user_transcript: '', interrupted: false };
      this.turns.push(turn);
      await say(samples);
      const whole = number !== questions.length - 3;
      const sounds = await this.#until(() => turn.audio_seconds > 0, `no answer to ${name}`);
      if (sounds && whole) await this.#until(() => turn.ended && !this.loudspeaker.left, `no end of the answer to ${name}`);
      await sleep(whole ? PAUSE : HEARD);
    }
  }

  async #until(is, complaint) {
    const late = now() + BEGIN;
    while (!is()) {
      if (this.#lost) throw new Error('the connection was closed');
      if (now() > late) return this.failed(complaint);
      await sleep(0.01);
    }
    return true;
  }

  report() {
    const rounded = (seconds) => Math.round(seconds * 1000) / 1000;
    const turns = this.turns.map(({ ended, ...turn }) => ({ ...turn, audio_seconds: rounded(turn.audio_seconds) }));
    const { client, version, errors, history } = this;
    return { client, version, turns, errors, history };
  }
}
