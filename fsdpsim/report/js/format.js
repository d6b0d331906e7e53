"use strict";
// ---- format.js: numbers as people read them, written as the command line writes them.

const TIME_UNITS = [["s", 1], ["ms", 1e-3], ["us", 1e-6], ["ns", 1e-9]];
const BYTE_UNITS = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];

/** The first unit that a span of this many seconds reaches: [name, its seconds]. */
function timeUnit(span) {
  return TIME_UNITS.find(([, size]) => Math.abs(span) >= size) ?? TIME_UNITS.at(-1);
}

/** The first unit that this many bytes reach: [name, its bytes]. */
function byteUnit(bytes) {
  return BYTE_UNITS.find(([, size]) => Math.abs(bytes) >= size) ?? ["B", 1];
}

/** `12.35 ms`: four digits. */
function showSeconds(seconds) {
  if (seconds === 0) return "0 s";
  const [name, size] = timeUnit(seconds);
  return `${Number((seconds / size).toPrecision(4))} ${name}`.replace("-", "−");
}

/** A moment, with as many digits as it takes to tell its distance from one `apart` seconds away. */
function showMoment(seconds, apart) {
  if (seconds === 0) return "0 s";
  const [name, size] = timeUnit(seconds);
  const digits = Math.ceil(Math.log10(Math.abs(seconds) / apart)) + 2;
  const precision = Math.min(Math.max(digits, 4), 12);
  return `${Number((seconds / size).toPrecision(precision))} ${name}`.replace("-", "−");
}

/** `1.50 GiB`. */
function showBytes(bytes) {
  const [name, size] = byteUnit(bytes);
  return `${(bytes / size).toFixed(size === 1 ? 0 : 2)} ${name}`;
}

/** How many thing: `1 op`, `3 ops`. */
function counted(number, thing) {
  return `${number.toLocaleString("en")} ${thing}${number === 1 ? "" : "s"}`;
}
