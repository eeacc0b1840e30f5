/**
 * PCM as the Realtime protocol carries it: int16, mono, 24 kHz, in base64; and WAV files of it.
 */

export const RATE = 24000;

/** Int16Array to base64. Its bytes are little-endian, as those of every browser's typed arrays. */
export function toBase64(samples) {
  const bytes = new Uint8Array(samples.buffer, samples.byteOffset, samples.byteLength);
  return btoa(String.fromCharCode(...bytes));
}

/** Base64 to Int16Array. */
export function fromBase64(text) {
  const characters = atob(text);
  const bytes = new Uint8Array(characters.length & ~1);
  for (let i = 0; i < bytes.length; i++) bytes[i] = characters.charCodeAt(i);
  return new Int16Array(bytes.buffer);
}

/** One Int16Array of several. */
export function joined(pieces) {
  const whole = new Int16Array(pieces.reduce((length, piece) => length + piece.length, 0));
  let place = 0;
  for (const piece of pieces) {
    whole.set(piece, place);
    place += piece.length;
  }
  return whole;
}

export function toSamples(milliseconds) {
  return Math.round((milliseconds * RATE) / 1000);
}

export function toMilliseconds(samples) {
  return Math.floor((samples * 1000) / RATE);
}

/** A WAV file (RIFF, format 1 = PCM, one channel of 16 bits) as a Blob. */
export function toWav(samples) {
  const header = new DataView(new ArrayBuffer(44));
  const text = (place, value) => [...value].forEach((letter, i) => header.setUint8(place + i, letter.charCodeAt(0)));
  text(0, 'RIFF');
  header.setUint32(4, 36 + samples.byteLength, true);
  text(8, 'WAVEfmt ');
  header.setUint32(16, 16, true); // bytes of the format
  header.setUint16(20, 1, true); // PCM
  header.setUint16(22, 1, true); // channels
  header.setUint32(24, RATE, true);
  header.setUint32(28, RATE * 2, true); // bytes per second
  header.setUint16(32, 2, true); // bytes of a sample
  header.setUint16(34, 16, true); // bits of a sample
  text(36, 'data');
  header.setUint32(40, samples.byteLength, true);
  return new Blob([header, samples], { type: 'audio/wav' });
}
