/**
 * The course of a conversation: what the server's events mean for the sound and the captions.
 *
 * An answer is cut where its listener speaks, types or stops it: its sound fades at once, the server is told how much was
 * heard (conversation.item.truncate), and its text of what was heard is asked for (conversation.item.retrieve).
 *
 * States, for the page: idle, listening, thinking, speaking, ducked.
 */

import { fromBase64, joined, toMilliseconds } from './audio.js';

const HARMLESS = ['response_cancel_not_active']; // the answer ended while its cancellation was under way

const newId = () => `item_${crypto.getRandomValues(new Uint32Array(3)).join('')}`;

export class Conversation {
  /** `onNotice(text)` shows a message; `onChange()` is called where the state may be another. */
  constructor({ send, player, captions, input, onNotice, onChange }) {
    Object.assign(this, { send, player, captions, input, onNotice, onChange });
    this.reset();
  }

  /** A new session knows nothing of the one before. */
  reset() {
    this.response = null; // {id, item, askedAt} of the answer under way
    this.isWaiting = false; // for an answer to begin
    this.isHearing = false; // the server hears a turn of the user
    this.isDucked = false;
    this.queuePosition = 0;
    this.askedAt = null; // when the last turn ended, in milliseconds of performance.now()
    this.answers = new Map(); // by item: {askedAt, isSpoken, pieces, timings}
    this.cut = new Set(); // responses of which nothing more is played
    this.spans = new Map(); // by item: milliseconds of the input that are a turn of the user
    this.partial = null; // item of the turn that is understood while it is spoken
    this.committed = []; // the same of the turns that the page committed and that have no item yet
    this.player.stop();
    this.player.duck(false);
  }

  get isSpeaking() {
    return [...this.player.items].some((item) => this.answers.has(item));
  }

  get isThinking() {
    return this.response !== null || this.isWaiting;
  }

  get isAnswering() {
    return this.isThinking || this.isSpeaking;
  }

  get state() {
    const isHeld = this.input.isActive && !this.input.handsFree;
    if (isHeld || this.isHearing) return 'listening';
    if (this.isSpeaking) return this.isDucked ? 'ducked' : 'speaking';
    return this.isThinking ? 'thinking' : 'idle';
  }

  receive(event) {
    HANDLERS[event.type]?.call(this, event);
    this.onChange();
  }

  /** The page has committed a held turn. */
  commit(span) {
    this.committed.push(span);
    this.ask();
  }

  /** Ask a written question, once the server knows what was heard of the answer before it. */
  async type(text) {
    await this.interrupt();
    const id = newId();
    const content = [{ type: 'input_text', text }];
    this.send({ type: 'conversation.item.create', item: { id, type: 'message', role: 'user', content } });
    const turn = this.captions.add('user', id);
    turn.add(text);
    turn.finish();
    this.ask();
  }

  ask() {
    this.askedAt = performance.now();
    this.isWaiting = true;
    this.send({ type: 'response.create' });
    this.onChange();
  }

  /** Stop the answer, if there is one; resolves when its sound has faded. */
  interrupt() {
    if (this.isThinking && !this.cut.has(this.response?.id)) this.send({ type: 'response.cancel' });
    return this.silence();
  }

  /** Stop the answer's sound; the server ends the answer by itself. */
  silence() {
    this.isDucked = false;
    if (this.response && !this.cut.has(this.response.id)) {
      this.cut.add(this.response.id);
      const answer = this.answers.get(this.response.item);
      if (answer?.isSpoken && answer.pieces.length === 0) this.truncate(this.response.item, 0); // text comes before its sound
    }
    return this.player.stop();
  }

  truncate(item, heard) {
    const end = toMilliseconds(heard);
    this.send({ type: 'conversation.item.truncate', item_id: item, content_index: 0, audio_end_ms: end });
  }

  /** The player has stopped an item after so many samples. */
  stopped(item, heard) {
    const answer = this.answers.get(item);
    if (answer) {
      answer.pieces = [joined(answer.pieces).slice(0, heard)];
      this.captions.change(item, (turn) => turn.setSound(answer.pieces[0]));
      this.truncate(item, heard);
    }
    this.player.duck(false);
    this.onChange();
  }

  /** An item of the player begins to be heard. */
  started(item, time) {
    const answer = this.answers.get(item);
    if (answer?.askedAt) this.time(item, { firstAudio: time - answer.askedAt });
    this.onChange();
  }

  finished(item) {
    if (this.answers.has(item)) {
      this.isDucked = false;
      this.player.duck(false);
    }
    this.onChange();
  }

  time(item, timings) {
    const answer = this.answers.get(item);
    if (!answer) return;
    Object.assign(answer.timings, timings);
    this.captions.change(item, (turn) => turn.setTimings(answer.timings));
  }
}

function addText({ item_id, delta }) {
  this.captions.change(item_id, (turn) => turn.add(delta));
}

/** By type of the server's events; `this` is the conversation. */
const HANDLERS = {
  error({ error }) {
    this.isWaiting = false;
    if (!HARMLESS.includes(error.code)) this.onNotice(error.message);
  },

  'session.updated'({ session }) {
    if (!session.audio.input.turn_detection) this.isHearing = false;
  },

  'input_audio_buffer.speech_started'({ item_id, audio_start_ms }) {
    this.isHearing = true;
    this.spans.set(item_id, { start: audio_start_ms });
    if (this.isAnswering) this.silence();
  },

  'input_audio_buffer.speech_stopped'({ item_id, audio_end_ms }) {
    this.isHearing = false;
    this.isWaiting = true;
    if (this.spans.has(item_id)) this.spans.get(item_id).end = audio_end_ms;
  },

  'input_audio_buffer.cleared'() {
    this.isHearing = false;
    if (this.partial) this.captions.remove(this.partial);
    this.partial = null;
  },

  'input_audio_buffer.committed'({ item_id }) {
    const span = this.spans.get(item_id) ?? this.committed.shift();
    if (this.spans.delete(item_id)) this.askedAt = performance.now();
    this.partial = null;
    const turn = this.captions.get(item_id) ?? this.captions.add('user', item_id);
    if (span?.end) turn.setSound(this.input.cut(span));
  },

  'omni.input_audio_transcription.partial'({ item_id, transcript }) {
    if (!this.captions.get(item_id)) this.captions.add('user', item_id);
    this.partial = item_id;
    this.captions.change(item_id, (turn) => turn.show(transcript, true));
  },

  'conversation.item.input_audio_transcription.delta': addText,

  'conversation.item.input_audio_transcription.completed'({ item_id, transcript }) {
    this.captions.change(item_id, (turn) => {
      turn.show(transcript);
      turn.finish('Spoken');
    });
  },

  'conversation.item.input_audio_transcription.failed'({ item_id }) {
    this.captions.change(item_id, (turn) => turn.finish('Spoken; no transcript'));
  },

  'conversation.item.truncated'({ item_id }) {
    this.send({ type: 'conversation.item.retrieve', item_id });
  },

  'conversation.item.retrieved'({ item }) {
    this.captions.change(item.id, (turn) => turn.setHeard(item.content?.[0]?.transcript ?? ''));
  },

  'response.created'({ response }) {
    this.isWaiting = false;
    this.response = { id: response.id, askedAt: this.askedAt };
    this.askedAt = null;
  },

  'response.output_item.added'({ item }) {
    if (item.role !== 'assistant') return;
    this.captions.add('assistant', item.id);
    this.answers.set(item.id, { askedAt: this.response.askedAt, isSpoken: false, pieces: [], timings: {} });
    this.response.item = item.id;
  },

  'response.content_part.added'({ item_id, part }) {
    const answer = this.answers.get(item_id);
    if (answer) answer.isSpoken = part.type === 'audio';
  },

  'response.output_audio_transcript.delta': addText,

  'response.output_text.delta': addText,

  'response.output_audio.delta'({ response_id, item_id, delta }) {
    const answer = this.answers.get(item_id);
    if (!answer || this.cut.has(response_id)) return;
    const samples = fromBase64(delta);
    answer.pieces.push(samples);
    this.player.add(item_id, samples);
  },

  'response.output_audio.done'({ response_id, item_id }) {
    const answer = this.answers.get(item_id);
    if (!answer || this.cut.has(response_id)) return;
    answer.pieces = [joined(answer.pieces)];
    this.captions.change(item_id, (turn) => turn.setSound(answer.pieces[0]));
    this.player.end(item_id);
  },

  'response.output_item.done'({ item }) {
    this.captions.change(item.id, (turn) => turn.finish('No words'));
  },

  'response.done'({ response }) {
    this.response = null;
    this.queuePosition = 0;
    for (const item of response.output ?? []) this.player.end(item.id);
    const trouble = response.status === 'failed' && response.status_details?.error;
    if (trouble) this.onNotice(`The answer failed: ${trouble.message ?? trouble.code ?? 'no reason was given'}`);
  },

  'omni.queue'({ place }) {
    this.queuePosition = place;
  },

  'omni.ducked'({ active }) {
    this.isDucked = active;
    this.player.duck(active);
  },

  'omni.timings'({ item_id, endpointing_ms, first_audio_ms }) {
    this.time(item_id, { endpointing: endpointing_ms, serverFirstAudio: first_audio_ms });
  },
};
