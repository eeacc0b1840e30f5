// The page of judge_browser.py: holds the conversation over WebRTC or over a WebSocket; its microphone is made of the files.

import { OpenAIRealtimeWebRTC, OpenAIRealtimeWebSocket, RealtimeAgent, RealtimeSession } from '@openai/agents-realtime';
import { Conversation, RATE, samplesOf, sleep } from './conversation.mjs';

const SILENT = 0.003; // amplitude that sound received has at least

// A MediaStream that is silent but for what is said.
class Stream {
  #context = new AudioContext();
  #out = this.#context.createMediaStreamDestination();
  stream = this.#out.stream;

  constructor() {
    const silence = new ConstantSourceNode(this.#context, { offset: 0 });
    silence.connect(this.#out);
    silence.start();
  }

  async say(samples) {
    const buffer = new AudioBuffer({ length: samples.length, sampleRate: RATE });
    buffer.copyToChannel(Float32Array.from(samples, (sample) => sample / 32768), 0);
    const source = new AudioBufferSourceNode(this.#context, { buffer });
    source.connect(this.#out);
    source.start();
    await new Promise((resolve) => source.addEventListener('ended', resolve));
  }
}

// Count the sound that an audio element plays, in pieces of 1024 samples.
async function listen(element, sounded) {
  const context = new AudioContext();
  const worklet = `registerProcessor('ear', class extends AudioWorkletProcessor {
    loudest = 0; count = 0;
    process([[samples]]) {
      for (const sample of samples ?? []) this.loudest = Math.max(this.loudest, Math.abs(sample));
      this.count += samples?.length ?? 0;
      if (this.count >= 1024) {
        this.port.postMessage([this.loudest, this.count / sampleRate]);
        this.loudest = this.count = 0;
      }
      return true;
    }
  })`;
  await context.audioWorklet.addModule(URL.createObjectURL(new Blob([worklet], { type: 'text/javascript' })));
  const ear = new AudioWorkletNode(context, 'ear');
  ear.port.onmessage = ({ data: [loudest, seconds] }) => loudest > SILENT && sounded(seconds);
  context.createMediaStreamSource(element.srcObject).connect(ear);
}

async function overWebRTC(conversation, agent, url, apiKey, questions) {
  const microphone = new Stream();
  const audioElement = document.createElement('audio');
  const transport = new OpenAIRealtimeWebRTC({
    baseUrl: `${url.replace('ws', 'http')}/realtime/calls`,
    mediaStream: microphone.stream,
    audioElement,
  });
  const session = new RealtimeSession(agent, { transport });
  conversation.follow(session);
  session.on('transport_event', (event) => {
    if (event.type === 'output_audio_buffer.cleared') conversation.interrupted();
    if (event.type === 'output_audio_buffer.stopped' || event.type === 'output_audio_buffer.cleared') conversation.ended();
  });
  await session.connect({ apiKey });
  await listen(audioElement, (seconds) => conversation.sounded(seconds, true));
  await conversation.hold((samples) => microphone.say(samples), questions);
  conversation.close(session);
}

async function overWebSocket(conversation, agent, url, apiKey, questions) {
  const transport = new OpenAIRealtimeWebSocket({ url: `${url}/realtime?model=omni` });
  const session = new RealtimeSession(agent, { transport });
  conversation.follow(session);
  await session.connect({ apiKey });
  await conversation.talk(session, questions);
  conversation.close(session);
}

// Converse over 'webrtc' or 'websocket' for `limit` seconds at most: the report, and whether something raised.
window.judge = async (transport, version, url, apiKey, files, limit) => {
  const conversation = new Conversation(`@openai/agents-realtime, chromium, ${transport}`, version);
  console.error = console.warn = (...told) => conversation.failed(told.map(String).join(' ')); // where the SDK logs
  window.addEventListener('unhandledrejection', (event) => conversation.failed(event.reason));
  const agent = new RealtimeAgent({ name: 'assistant', instructions: 'Answer briefly.' });
  const read = async (name) => ({ name, samples: samplesOf(await (await fetch(name)).arrayBuffer()) });
  const late = sleep(limit).then(() => Promise.reject(new Error(`not done after ${limit} seconds`)));
  try {
    const converse = transport === 'webrtc' ? overWebRTC : overWebSocket;
    await Promise.race([late, converse(conversation, agent, url, apiKey, await Promise.all(files.map(read)))]);
  } catch (error) {
    conversation.failed(error);
    return [conversation.report(), true];
  }
  return [conversation.report(), false];
};
