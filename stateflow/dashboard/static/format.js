// Numbers, bytes and times for people, in the usual units.
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const two = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const NONE = "–";

const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

export const count = (value) => (known(value) ? whole.format(value) : NONE);

/** Formats rows a second, without the unit. */
export function rate(value) {
  if (!known(value)) return NONE;
  if (value >= 1e6) return `${two.format(value / 1e6)} M`;
  if (value >= 1e4) return `${two.format(value / 1e3)} k`;
  return value >= 10 || value === 0 ? whole.format(value) : value.toFixed(1);
}

/** Formats an estimate. */
export const about = (value) => (known(value) ? `≈ ${value < 1e4 ? count(value) : rate(value)}` : NONE);

export function bytes(value) {
  if (!known(value)) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit ? value.toFixed(value < 100 ? 1 : 0) : whole.format(value)} ${units[unit]}`;
}

export function ms(value) {
  if (!known(value)) return NONE;
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)} s`;
  return `${value >= 100 ? whole.format(value) : value.toFixed(value < 10 ? 2 : 1)} ms`;
}

export function seconds(value) {
  if (!known(value)) return NONE;
  if (value < 10) return `${value.toFixed(1)} s`;
  if (value < 90) return `${value.toFixed(0)} s`;
  return value < 5400 ? `${(value / 60).toFixed(0)} min` : `${(value / 3600).toFixed(1)} h`;
}

/** Formats a number of seconds as a time in the past; a dash if it is below 0, which means never. */
export const ago = (value) => (value < 0 ? NONE : `${seconds(value)} ago`);

/** Formats milliseconds for an axis, which has room for few characters. */
export const onAxis = (value) => (value < 1e3 ? `${value} ms` : `${value / 1e3} s`);

/** Formats entities a second. */
export function pace(value) {
  if (!known(value)) return NONE;
  return `${value < 10 ? Number(value.toPrecision(3)) : rate(value)}/s`;
}

/** Formats microseconds since 1970 as local time, with the date unless it is today; a dash beyond what a Date holds. */
export function time(us) {
  const at = new Date(us / 1000);
  if (!us || !known(at.getTime())) return NONE;
  const today = at.toDateString() === new Date().toDateString();
  const clock = at.toLocaleTimeString("en-GB");
  if (today) return clock;
  const [month, day] = [at.getMonth() + 1, at.getDate()].map((number) => String(number).padStart(2, "0"));
  return `${at.getFullYear()}-${month}-${day} ${clock}`;
}

export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;

/** Formats [0, 1, 2, 5] as "0–2, 5". */
export function ranges(numbers) {
  const words = [];
  for (let i = 0; i < numbers.length;) {
    let j = i;
    while (j + 1 < numbers.length && numbers[j + 1] === numbers[j] + 1) j += 1;
    words.push(i === j ? `${numbers[i]}` : `${numbers[i]}–${numbers[j]}`);
    i = j + 1;
  }
  return words.join(", ");
}

/** The tone in which each state is shown. */
export const TONES = {
  alive: "good",
  opening: "warn",
  silent: "bad",
  stopped: "bad",
  unknown: "warn",
  RUNNING: "busy",
  IN_PROGRESS: "busy",
  IN_PROCESS: "busy",
  GENERATE_IID: "busy",
  COMPLETED: "good",
  DONE: "good",
  PROCESSED: "good",
  FAILED: "bad",
  CANCELLED: "warn",
  PAUSED: "warn",
};
