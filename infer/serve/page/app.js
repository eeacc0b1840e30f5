/**
 * The voice page: puts its parts together and shows their state.
 *
 *      talk (button, input) ----------> connection -> conversation -> captions
 *                     ^ microphone                    v
 *      settings ----> session.update                  player, meters
 */

import { Meter, Microphone, Player, canRecord, openContext, run, toWav } from './audio.js';
import { Captions } from './captions.js';
import { Connection } from './connection.js';
import { Conversation } from './conversation.js';
import { Settings } from './settings.js';
import { TalkButton, VoiceInput } from './talk.js';

const REPLAY = 'replay'; // the player's name of a turn that is heard again
const KEY = 'omni.key'; // in sessionStorage
const NO_CONNECTION = 'The server cannot be reached now.';
const NO_RECORDING = 'A microphone works only on https or localhost. You can type and listen here.';
const LONGEST = 30; // seconds of a turn, where the server names none
const SPARE = 1; // seconds by which a held turn is shorter than what the server takes
const RESUMING = 2000; // milliseconds that the sound has to start

const byId = (id) => document.getElementById(id);
const pause = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

const config = await loadConfig();
const settings = new Settings(byId('settings-form'), config, changeSetting);
const captions = new Captions(byId('captions'), { replay, save });
const connection = new Connection({ needsKey: config.needs_key, onEvent: receive, onStatus: showConnection });
const send = (event) => connection.send(event);
const microphone = new Microphone({ onPiece: hear, onLost: loseMicrophone });
const player = new Player({
  onStart: (item, time) => conversation.started(item, time),
  onFinish: (item) => conversation.finished(item),
  onStop: (item, heard) => conversation.stopped(item, heard),
});
const input = new VoiceInput({ send, onTurn: (span) => conversation.commit(span), onNotice: notice });
const conversation = new Conversation({ send, player, captions, input, onNotice: notice, onChange: show });
const talkButton = new TalkButton(byId('talk'), { onBegin: beginTalk, onEnd: endTalk });
let sound = null; // promise of the AudioContext

start();

/** The server's description of itself; asked for until it answers. */
async function loadConfig() {
  for (;;) {
    const answer = await fetch('/page/config.json', { cache: 'no-store' }).catch(() => null);
    if (answer?.ok) return answer.json();
    byId('connection').textContent = 'The server does not answer. Trying again.';
    await pause(3000);
  }
}

function start() {
  byId('model').textContent = config.model;
  byId('version').textContent = `Omni ${config.version}, model ${config.model}`;
  byId('hearing').hidden = !config.is_shipped;
  byId('speaker-field').hidden = !('setSinkId' in AudioContext.prototype);
  input.longest = (config.max_seconds ?? LONGEST) - SPARE;
  byId('mute').addEventListener('click', toggleMute);
  byId('stop').addEventListener('click', stop);
  byId('composer').addEventListener('submit', type);
  byId('key-form').addEventListener('submit', giveKey);
  byId('notice-close').addEventListener('click', () => notice(''));
  byId('open-settings').addEventListener('click', () => byId('settings').showModal());
  navigator.mediaDevices?.addEventListener('devicechange', () => settings.listDevices());
  document.addEventListener('keydown', ({ key }) => {
    if (key === 'Escape' && !byId('settings').open) stop();
  });
  const meters = [
    new Meter(byId('microphone-level'), -1, () => (input.isActive ? microphone.analyser : null)),
    new Meter(byId('answer-level'), 1, () => player.analyser),
  ];
  run(meters, (level) => byId('talk').style.setProperty('--level', level.toFixed(2)));
  window.omniPage = { underruns: () => player.underruns };
  setHandsFree();
  if (!canRecord()) notice(NO_RECORDING);
  connection.open(sessionStorage.getItem(KEY) ?? '');
}

// The talk

/** The AudioContext, running; without a device to play on, a browser may never start it. */
async function openSound() {
  sound ??= openContext(settings.values.speaker).then((context) => {
    player.open(context);
    return context;
  });
  const context = await sound;
  await Promise.race([context.resume(), pause(RESUMING)]);
  if (context.state !== 'running') throw new Error('The browser cannot play sound now. Is a speaker connected?');
  return context;
}

async function beginTalk() {
  notice('');
  conversation.interrupt();
  try {
    const context = await openSound();
    if (!(await connection.ready())) throw new Error(NO_CONNECTION);
    await microphone.open(context, settings.values.microphone);
  } catch (error) {
    talkButton.set(false);
    notice(error.message);
    return;
  }
  settings.listDevices();
  if (microphone.isMuted) notice('The microphone is muted.');
  if (talkButton.isOn) input.begin();
  else if (input.handsFree) microphone.close();
  show();
}

function endTalk() {
  input.end();
  if (input.handsFree) microphone.close();
  show();
}

/** Take a piece of the microphone's sound; a turn that is heard again is none of the user's. */
function hear(piece) {
  if (player.has(REPLAY)) piece.fill(0);
  input.take(piece);
}

function loseMicrophone() {
  talkButton.set(false);
  notice('The microphone was disconnected.');
}

function stop() {
  conversation.interrupt();
  show();
}

async function type(event) {
  event.preventDefault();
  const text = byId('text').value.trim();
  if (!text) return;
  byId('text').value = '';
  notice('');
  await openSound().catch((error) => notice(error.message));
  if (await connection.ready()) {
    conversation.type(text);
  } else {
    byId('text').value = text;
    notice(NO_CONNECTION);
  }
}

async function replay(turn) {
  if (conversation.isAnswering) {
    notice('An answer is under way. Stop it first.');
    return;
  }
  await openSound().catch((error) => notice(error.message));
  await player.stop();
  player.add(REPLAY, turn.sound);
  player.end(REPLAY);
  show();
}

function save(turn) {
  const link = document.createElement('a');
  link.href = URL.createObjectURL(toWav(turn.sound));
  link.download = `omni-${turn.number}-${turn.role}.wav`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// The settings

async function changeSetting(name) {
  if (name === 'speaker') {
    const refused = (error) => notice(`The speaker cannot be used (${error.message}).`);
    await (await sound)?.setSinkId(settings.values.speaker).catch(refused);
  } else if (name === 'microphone') {
    const wasOn = talkButton.isOn;
    talkButton.set(false);
    microphone.close();
    talkButton.set(wasOn);
  } else {
    if (name === 'handsFree') setHandsFree();
    send({ type: 'session.update', session: settings.session });
  }
}

function setHandsFree() {
  talkButton.set(false);
  input.handsFree = talkButton.isSwitch = settings.values.handsFree;
  show();
}

function toggleMute() {
  microphone.mute(!microphone.isMuted);
  byId('mute').setAttribute('aria-pressed', String(microphone.isMuted));
  notice('');
}

// The connection

function receive(event) {
  conversation.receive(event);
  if (event.type !== 'session.created') return;
  send({ type: 'session.update', session: settings.session });
  if (talkButton.isOn) input.begin();
}

function showConnection({ name, reason, attempt }) {
  const why = { full: 'The server is full', lost: 'There is no connection' }[reason] ?? reason;
  const texts = {
    connecting: attempt > 1 ? `Connecting, attempt ${attempt}.` : 'Connecting',
    open: 'Connected',
    waiting: `${why}. Trying again, attempt ${attempt + 1}.`,
    ended: 'The session has ended. Talk or type to begin another.',
    key: 'Not connected',
  };
  document.body.dataset.connection = name;
  byId('connection').textContent = texts[name];
  byId('key-form').hidden = name !== 'key';
  if (name === 'key') {
    const isMissing = reason === 'needed';
    byId('key-label').textContent = isMissing ? 'This server needs a key.' : 'The server refused this key. Give another.';
    byId('key').focus();
  }
  if (name === 'open' && byId('notice-text').textContent === NO_CONNECTION) notice('');
  if (name === 'open') captions.divide('A new session: the model does not know what was said before.');
  if (name !== 'connecting') {
    conversation.reset();
    input.reset();
    show();
  }
}

function giveKey(event) {
  event.preventDefault();
  const key = byId('key').value.trim();
  byId('key').value = '';
  sessionStorage.setItem(KEY, key);
  connection.open(key);
}

// What is shown

function notice(text) {
  captions.keepInSight(() => {
    byId('notice').hidden = !text;
    byId('notice-text').textContent = text;
  });
}

function show() {
  const { state, queuePosition } = conversation;
  const texts = {
    idle: input.handsFree ? 'Press to start talking' : 'Hold to talk',
    listening: 'Listening',
    thinking: queuePosition > 0 ? `Waiting for room: place ${queuePosition} in the queue` : 'Thinking',
    speaking: 'Speaking',
    ducked: 'Speaking softly',
  };
  if (state === 'idle' && input.handsFree && input.isActive) texts.idle = 'Just speak';
  if (state === 'idle' && player.has(REPLAY)) texts.idle = 'Replaying';
  document.body.dataset.state = state;
  if (byId('state').textContent !== texts[state]) byId('state').textContent = texts[state];
  byId('stop').disabled = !conversation.isAnswering && !player.has(REPLAY);
}
