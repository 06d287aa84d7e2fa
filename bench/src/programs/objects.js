// Many small objects behind a map: built, walked, changed, looked up. Prints what it saw.
const entries = Number(process.argv[process.argv.length - 1]);
let state = 7;
const random = () => (state = (Math.imul(state, 1664525) + 1013904223) >>> 0) / 4294967296;
const table = new Map();
for (let nth = 0; nth < entries; nth++) {
  const key = `${['user', 'order', 'session', 'item'][nth % 4]}-${nth}`;
  table.set(key, { id: nth, name: key.toUpperCase(), score: random(), tags: [key.slice(0, 2), nth % 97] });
}
for (let turn = 0; turn < 3; turn++) {
  let total = 0;
  for (const entry of table.values()) {
    total += entry.score;
    entry.tags.push(turn);
  }
  console.log('turn', turn, table.size, total.toFixed(6));
}
const digest = require('crypto').createHash('sha256');
const keys = [...table.keys()];
for (let nth = 0; nth < entries / 20; nth++) {
  digest.update(JSON.stringify(table.get(keys[Math.floor(random() * entries)])));
}
console.log(digest.digest('hex'));
