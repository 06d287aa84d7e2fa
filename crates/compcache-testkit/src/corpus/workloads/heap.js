// Grows a heap like those of Node programs until it is as many MB as the last argument says; prints "ready"; waits.
const wanted = Number(process.argv[process.argv.length - 1]) * 1048576;
const fs = require('fs');
const path = require('path');

// Source text that every installation has: the library's own functions, as strings.
const texts = [];
for (const name of require('module').builtinModules) {
  if (name.startsWith('_') || name.includes('wasi') || name.includes('punycode') || name === 'sys') continue;
  const library = require(name);
  const parts = [String(library)];
  for (const key of Object.keys(library)) {
    const member = library[key];
    if (typeof member === 'function') {
      parts.push(`${name}.${key} ${member}`);
      for (const own of Object.getOwnPropertyNames(member.prototype || {})) {
        const method = Object.getOwnPropertyDescriptor(member.prototype, own).value;
        if (typeof method === 'function') parts.push(`${key}.${own} ${method}`);
      }
    }
  }
  texts.push(parts.join('\n'));
}

let state = 1;
function random() {
  state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
  return state / 4294967296;
}

const kept = [];
const index = new Map();
class Row {
  constructor(key, word, where) {
    this.key = key;
    this.word = word;
    this.where = where;
    this.weight = random();
    this.tags = [word.slice(0, 2), word.length, random() < 0.5];
  }
}

for (let nth = 0; process.memoryUsage().heapUsed + process.memoryUsage().external < wanted; nth++) {
  const text = texts[nth % texts.length];
  const words = text.split(/\W+/);
  words.forEach((word, place) => {
    if (!index.has(word)) index.set(word, []);
    if (index.get(word).length < 40 + nth) index.get(word).push({ nth, place });
  });
  kept.push(words.slice(0, 2000).map((word, place) => new Row(`${nth}:${place}`, word, { nth, place })));
  const document = { nth, lines: text.split('\n').slice(0, 300), numbers: Array.from({ length: 300 }, random) };
  kept.push(JSON.parse(JSON.stringify(document)));
  if (nth % 3 === 0) kept.push(Buffer.from(JSON.stringify(document)));
  if (nth % 4 === 0) kept.push(Float64Array.from({ length: 500 }, (_, i) => Math.sin(i + nth)));
  if (nth % 5 === 0) kept.push(new Map(words.slice(0, 500).map((word, place) => [word, () => place + nth])));
  if (nth % 7 === 0) kept.splice(Math.floor(random() * kept.length), 1);
}

fs.writeSync(1, 'ready\n');
process.stdin.on('end', () => process.exit(kept.length > 0 ? 0 : path.sep.length)).resume();
