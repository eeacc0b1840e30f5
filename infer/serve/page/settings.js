/**
 * The settings form: what was chosen is kept in localStorage and becomes the session's configuration.
 */

import { RATE } from './audio.js';

const STORE = 'omni.settings';
const DEVICES = { microphone: 'audioinput', speaker: 'audiooutput' };
const NAMES = { answer: 'Answer', transcribe: 'Transcribe', default: 'Default' };

export class Settings {
  /** `config` is the server's; `onChange(name)` is called with the name of a field that was changed. */
  constructor(form, config, onChange) {
    Object.assign(this, { form, config });
    fill(form.elements.voice, named(config.voices));
    fill(form.elements.task, named(config.tasks));
    this.restore();
    this.show();
    document.addEventListener('input', ({ target }) => {
      if (target.form !== form) return; // some of its fields stand elsewhere
      this.show();
      localStorage.setItem(STORE, JSON.stringify(this.values));
      onChange(target.name);
    });
  }

  /** By name of the fields. */
  get values() {
    const fields = [...this.form.elements].filter((field) => field.name);
    return Object.fromEntries(fields.map((field) => [field.name, field.type === 'checkbox' ? field.checked : field.value]));
  }

  restore() {
    for (const [name, value] of Object.entries(JSON.parse(localStorage.getItem(STORE) ?? '{}'))) {
      const field = this.form.elements[name];
      if (!field) continue;
      if (DEVICES[name]) field.add(new Option('As chosen before', value, true, true));
      else if (field.type === 'checkbox') field.checked = value;
      else if (!field.options || [...field.options].some((option) => option.value === value)) field.value = value;
    }
  }

  show() {
    const { temperature, detection, handsFree } = this.values;
    this.form.elements.temperatureShown.value = Number(temperature).toFixed(2);
    this.form.elements.eagerness.disabled = !handsFree || detection !== 'semantic_vad';
    this.form.elements.detection.disabled = !handsFree;
  }

  /** The session of a session.update. */
  get session() {
    const { handsFree, detection, eagerness, temperature, task, voice } = this.values;
    const format = { type: 'audio/pcm', rate: RATE };
    const turns = detection === 'semantic_vad' ? { type: detection, eagerness } : { type: detection };
    return {
      type: 'realtime',
      output_modalities: [this.config.speaks && task !== 'transcribe' ? 'audio' : 'text'],
      audio: {
        input: { format, transcription: { model: 'omni' }, turn_detection: handsFree ? turns : null },
        output: { format, voice },
      },
      omni: { temperature: Number(temperature), task, partial_transcripts: true },
    };
  }

  /** List the microphones and speakers; a browser names them once the microphone was allowed. */
  async listDevices() {
    const devices = (await navigator.mediaDevices?.enumerateDevices?.()) ?? [];
    for (const [name, kind] of Object.entries(DEVICES)) {
      const known = devices.filter((device) => device.kind === kind && !['', 'default'].includes(device.deviceId));
      if (known.length === 0) continue;
      const field = this.form.elements[name];
      const chosen = field.value;
      fill(field, [['', 'System default'], ...known.map(({ deviceId, label }, i) => [deviceId, label || `Device ${i + 1}`])]);
      if (known.some(({ deviceId }) => deviceId === chosen)) field.value = chosen;
    }
  }
}

function named(ids) {
  return ids.map((id) => [id, NAMES[id] ?? id]);
}

function fill(select, options) {
  select.replaceChildren(...options.map(([value, text]) => new Option(text, value)));
}
