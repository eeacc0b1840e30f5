/**
 * Levels of the microphone and the answer as rows of bars that move away from the talk button, and as its halo.
 *
 * Where reduced motion is asked for, nothing moves along: each side is one bar that shows the present level.
 */

const BAR = 3; // CSS pixels, and as many between bars
const BAR_MILLISECONDS = 50;
const LOUD = 0.25; // root mean square of a full bar

export class Meter {
  /** `analyser()` gives an AnalyserNode, or null while there is no sound; `direction` is -1 for bars that move to the left. */
  constructor(canvas, direction, analyser) {
    this.canvas = canvas;
    this.direction = direction;
    this.analyser = analyser;
    this.samples = new Float32Array(1024);
    this.levels = [];
    this.level = 0;
    new ResizeObserver(() => this.resize()).observe(canvas);
  }

  resize() {
    const { canvas } = this;
    canvas.width = canvas.clientWidth * devicePixelRatio;
    canvas.height = canvas.clientHeight * devicePixelRatio;
    this.bars = Math.floor(canvas.clientWidth / (2 * BAR));
    this.levels = new Array(this.bars).fill(0);
    this.draw();
  }

  /** Measure, and draw where there is something new. */
  step(isStill) {
    const analyser = this.analyser();
    this.level = analyser ? this.measure(analyser) : 0;
    const wasQuiet = !this.levels.some(Boolean);
    this.levels = isStill ? [this.level] : [this.level, ...this.levels].slice(0, this.bars);
    if (this.level || !wasQuiet) this.draw();
  }

  measure(analyser) {
    analyser.getFloatTimeDomainData(this.samples);
    const power = this.samples.reduce((sum, sample) => sum + sample * sample, 0) / this.samples.length;
    return Math.min(1, Math.sqrt(Math.sqrt(power) / LOUD));
  }

  draw() {
    const { canvas, levels, direction } = this;
    const context = canvas.getContext('2d');
    const width = canvas.clientWidth;
    const middle = canvas.clientHeight / 2;
    context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    context.clearRect(0, 0, width, canvas.clientHeight);
    context.fillStyle = getComputedStyle(canvas).color;
    levels.forEach((level, i) => {
      const half = Math.max(BAR / 2, level * middle);
      const place = i * 2 * BAR;
      context.globalAlpha = 1 - (0.85 * i) / this.bars;
      context.beginPath();
      context.roundRect(direction < 0 ? width - place - BAR : place, middle - half, BAR, 2 * half, BAR / 2);
      context.fill();
    });
  }
}

/** Step the meters as long as the page is seen; `onLevel` gets the louder one's level, 0 to 1. */
export function run(meters, onLevel) {
  const reduced = matchMedia('(prefers-reduced-motion: reduce)');
  let last = 0;
  const frame = (now) => {
    requestAnimationFrame(frame);
    if (now - last < BAR_MILLISECONDS) return;
    last = now;
    meters.forEach((meter) => meter.step(reduced.matches));
    onLevel(reduced.matches ? 0 : Math.max(...meters.map(({ level }) => level)));
  };
  requestAnimationFrame(frame);
}
