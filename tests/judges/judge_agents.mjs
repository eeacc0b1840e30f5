// Judge: the OpenAI Agents SDK for JavaScript, in Node, over a WebSocket, with the settings that it comes with.
//
//     node judge_agents.mjs [--limit SECONDS] ws://127.0.0.1:PORT/v1 KEY FILE...
//
// The SDK is taken from $JUDGES/node, where setup.sh installs it ($JUDGES is /tmp/judges by default).

import { readFile } from 'node:fs/promises';
import { createRequire } from 'node:module';
import { basename } from 'node:path';
import { parseArgs } from 'node:util';
import { Conversation, samplesOf } from './conversation.mjs';

const packages = `${process.env.JUDGES ?? '/tmp/judges'}/node/`;
const { RealtimeAgent, RealtimeSession } = createRequire(packages)('@openai/agents/realtime');
const { version } = JSON.parse(await readFile(`${packages}node_modules/@openai/agents-realtime/package.json`));

const { values, positionals } = parseArgs({ options: { limit: { type: 'string', default: '120' } }, allowPositionals: true });
const [url, apiKey, ...files] = positionals;
const conversation = new Conversation('@openai/agents-realtime, node', version);

function finish(error) {
  if (error) conversation.failed(error);
  console.log(JSON.stringify(conversation.report(), null, 1));
  process.exit(error ? 1 : 0);
}

console.error = console.warn = (...told) => conversation.failed(told.map(String).join(' ')); // where the SDK logs
process.on('uncaughtException', finish);
setTimeout(() => finish(new Error(`not done after ${values.limit} seconds`)), 1000 * values.limit);

const questions = await Promise.all(
  files.map(async (file) => ({ name: basename(file), samples: samplesOf(new Uint8Array(await readFile(file)).buffer) })),
);
const session = new RealtimeSession(new RealtimeAgent({ name: 'assistant', instructions: 'Answer briefly.' }), {
  transport: 'websocket',
});
conversation.follow(session);
await session.connect({ url: `${url}/realtime?model=omni`, apiKey });
await conversation.talk(session, questions);
conversation.close(session);
finish();
