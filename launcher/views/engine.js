// A GPT in plain JavaScript: the layout of Qwen3, one token at a time, as models/engine.py does.
"use strict";

const NORM_EPSILON = 1e-6;

// The bytes of which a page holds base64 of gzip.
async function decompress(base64) {
  const packed = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// The header (JSON) and the tensors of a model that pack wrote.
function unpack(bytes) {
  const headerLength = new DataView(bytes.buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + headerLength)));
  return { header, tensors: bytes.subarray(4 + headerLength) };
}

function float16(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 0x1f;
  const fraction = bits & 0x3ff;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}

// Each tensor as Float32Array: codes times the scale of their group, or float32 as it is.
function readTensors(header, bytes) {
  const tensors = {};
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  let offset = 0;
  for (const { name, size, quantized } of header.tensors) {
    const values = new Float32Array(size);
    if (quantized) {
      const nGroups = Math.ceil(size / header.group);
      const codes = offset + 2 * nGroups; // after the scales, float16
      for (let group = 0; group < nGroups; group++) {
        const scale = float16(view.getUint16(offset + 2 * group, true));
        const end = Math.min((group + 1) * header.group, size);
        for (let i = group * header.group; i < end; i++) values[i] = view.getInt8(codes + i) * scale;
      }
      offset = codes + nGroups * header.group;
    } else {
      for (let i = 0; i < size; i++) values[i] = view.getFloat32(offset + 4 * i, true);
      offset += 4 * size;
    }
    tensors[name] = values;
  }
  return tensors;
}

// out[row] = sum over columns of weight[row, column] * x[column]
function multiply(weight, x, out) {
  const nColumns = x.length;
  for (let row = 0, start = 0; row < out.length; row++, start += nColumns) {
    let sum0 = 0, sum1 = 0, sum2 = 0, sum3 = 0;
    let column = 0;
    for (; column + 3 < nColumns; column += 4) {
      sum0 += weight[start + column] * x[column];
      sum1 += weight[start + column + 1] * x[column + 1];
      sum2 += weight[start + column + 2] * x[column + 2];
      sum3 += weight[start + column + 3] * x[column + 3];
    }
    for (; column < nColumns; column++) sum0 += weight[start + column] * x[column];
    out[row] = sum0 + sum1 + sum2 + sum3;
  }
  return out;
}

// x over its root mean square, times the weight, where there is one; from `begin`, `length` long.
function normalize(x, weight, out, begin = 0, length = x.length) {
  let squares = 0;
  for (let i = 0; i < length; i++) squares += x[begin + i] ** 2;
  const scale = 1 / Math.sqrt(squares / length + NORM_EPSILON);
  for (let i = 0; i < length; i++) out[begin + i] = x[begin + i] * scale * (weight ? weight[i] : 1);
  return out;
}

class Model {
  constructor(header, bytes) {
    this.config = header.config;
    this.weights = readTensors(header, bytes);
    const c = this.config;
    const vector = (length) => new Float32Array(length);
    this.x = vector(c.n_embd);
    this.normed = vector(c.n_embd);
    this.added = vector(c.n_embd);
    this.qkv = vector((c.n_head + 2 * c.n_kv_head) * c.head_dim);
    this.attended = vector(c.n_head * c.head_dim);
    this.gateUp = vector(2 * c.hidden_dim);
    this.hidden = vector(c.hidden_dim);
    this.logits = vector(c.vocab_size);
    this.scores = vector(c.block_size);
    const cacheSize = c.block_size * c.n_kv_head * c.head_dim; // of a layer
    this.keys = Array.from({ length: c.n_layer }, () => vector(cacheSize));
    this.values = Array.from({ length: c.n_layer }, () => vector(cacheSize));
    this.frequencies = Array.from({ length: c.head_dim / 2 },
      (_, i) => Math.fround(c.rope_theta ** (-2 * i / c.head_dim)));
    this.clear();
  }

  clear() { // forgets all tokens
    this.position = 0;
    this.ids = [];
  }

  // Yields after each of the last block_size ids; the logits after the last one are in this.logits.
  // What the model has seen of these ids is not computed again.
  *read(ids) {
    ids = ids.slice(-this.config.block_size);
    let nSeen = 0;
    if (this.position <= this.config.block_size)
      while (nSeen < ids.length - 1 && ids[nSeen] === this.ids[nSeen]) nSeen += 1;
    this.position = nSeen;
    this.ids.length = nSeen;
    for (const id of ids.slice(nSeen)) yield this.forward(id);
  }

  // The logits after one more token; they are overwritten by the next call.
  forward(id) {
    const c = this.config;
    const w = this.weights;
    this.ids.push(id);
    this.x.set(w["embed.weight"].subarray(id * c.n_embd, (id + 1) * c.n_embd));
    for (let layer = 0; layer < c.n_layer; layer++) {
      const block = `blocks.${layer}.`;
      normalize(this.x, w[`${block}attention_norm`], this.normed);
      this.attend(layer, block);
      this.addToX();
      normalize(this.x, w[`${block}mlp_norm`], this.normed);
      multiply(w[`${block}mlp.gate_up.weight`], this.normed, this.gateUp);
      for (let i = 0; i < c.hidden_dim; i++) {
        const gate = this.gateUp[i];
        this.hidden[i] = gate / (1 + Math.exp(-gate)) * this.gateUp[c.hidden_dim + i];
      }
      multiply(w[`${block}mlp.down.weight`], this.hidden, this.added);
      this.addToX();
    }
    this.position += 1;
    normalize(this.x, w["norm"], this.normed);
    return multiply(w["head.weight"] ?? w["embed.weight"], this.normed, this.logits);
  }

  addToX() {
    for (let i = 0; i < this.x.length; i++) this.x[i] += this.added[i];
  }

  // Attention of the newest position over the last block_size ones, into this.added.
  attend(layer, block) {
    const { n_head, n_kv_head, head_dim, block_size } = this.config;
    const w = this.weights;
    const qkv = multiply(w[`${block}attention.qkv.weight`], this.normed, this.qkv);
    for (let head = 0; head < n_head + n_kv_head; head++) {
      const weight = w[`${block}attention.${head < n_head ? "q_norm" : "k_norm"}`];
      normalize(qkv, weight, qkv, head * head_dim, head_dim);
      this.rotate(qkv, head * head_dim);
    }
    const width = n_kv_head * head_dim; // of the keys of a position
    const slot = this.position % block_size;
    const queryWidth = n_head * head_dim;
    this.keys[layer].set(qkv.subarray(queryWidth, queryWidth + width), slot * width);
    this.values[layer].set(qkv.subarray(queryWidth + width), slot * width);
    const nPositions = Math.min(this.position + 1, block_size);
    const headsPerKey = n_head / n_kv_head; // which share keys and values
    for (let head = 0; head < n_head; head++) {
      const keyStart = Math.floor(head / headsPerKey) * head_dim; // in each position
      this.attendWithHead(this.keys[layer], this.values[layer], head * head_dim, keyStart, nPositions);
    }
    multiply(w[`${block}attention.out.weight`], this.attended, this.added);
  }

  attendWithHead(keys, values, queryStart, keyStart, nPositions) {
    const { n_kv_head, head_dim } = this.config;
    const width = n_kv_head * head_dim;
    const scores = this.scores;
    let largest = -Infinity;
    for (let position = 0; position < nPositions; position++) {
      let score = 0;
      const start = position * width + keyStart;
      for (let i = 0; i < head_dim; i++) score += this.qkv[queryStart + i] * keys[start + i];
      scores[position] = score / Math.sqrt(head_dim);
      largest = Math.max(largest, scores[position]);
    }
    let sum = 0;
    for (let position = 0; position < nPositions; position++) {
      scores[position] = Math.exp(scores[position] - largest);
      sum += scores[position];
    }
    this.attended.fill(0, queryStart, queryStart + head_dim);
    for (let position = 0; position < nPositions; position++) {
      const share = scores[position] / sum;
      const start = position * width + keyStart;
      for (let i = 0; i < head_dim; i++) this.attended[queryStart + i] += share * values[start + i];
    }
  }

  // Turns the pairs (i, i + head_dim / 2) of a head by the angles of the position.
  rotate(heads, start) {
    const half = this.config.head_dim / 2;
    for (let i = 0; i < half; i++) {
      const angle = Math.fround(this.position * this.frequencies[i]);
      const cosine = Math.cos(angle), sine = Math.sin(angle);
      const first = heads[start + i], second = heads[start + half + i];
      heads[start + i] = first * cosine - second * sine;
      heads[start + half + i] = second * cosine + first * sine;
    }
  }
}

// The probabilities of logits divided by the temperature.
function softmax(logits, temperature = 1) {
  const probabilities = new Float64Array(logits.length);
  let largest = -Infinity;
  for (const logit of logits) largest = Math.max(largest, logit);
  let sum = 0;
  for (let id = 0; id < logits.length; id++) {
    probabilities[id] = Math.exp((logits[id] - largest) / temperature);
    sum += probabilities[id];
  }
  for (let id = 0; id < logits.length; id++) probabilities[id] /= sum;
  return probabilities;
}

function argmax(values) {
  let best = 0;
  for (let i = 1; i < values.length; i++) if (values[i] > values[best]) best = i;
  return best;
}

// An id, drawn by its probability among the topK likeliest (0: all) and those that have topP of
// the probability; a temperature of 0 takes the likeliest.
function draw(logits, { temperature, topK = 0, topP = 1 }, random = Math.random) {
  if (temperature === 0) return argmax(logits);
  const probabilities = softmax(logits, temperature);
  const sum = topK > 0 || topP < 1 ? keepLikeliest(probabilities, topK, topP) : 1;
  let remaining = random() * sum;
  for (let id = 0; id < probabilities.length; id++) {
    remaining -= probabilities[id];
    if (remaining < 0) return id;
  }
  return argmax(probabilities); // rounding left a little
}

// Sets all probabilities to 0 but the topK largest (0: all), and of these the fewest that have at
// least topP of their sum. Returns the sum of what is left.
function keepLikeliest(probabilities, topK, topP) {
  const ids = Array.from(probabilities.keys());
  ids.sort((a, b) => probabilities[b] - probabilities[a]);
  const candidates = topK > 0 ? ids.slice(0, topK) : ids;
  const limit = topP * candidates.reduce((sum, id) => sum + probabilities[id], 0);
  let sum = 0;
  let n = 0;
  while (n < candidates.length && sum < limit) sum += probabilities[candidates[n++]];
  for (const id of ids.slice(n)) probabilities[id] = 0;
  return sum;
}

// Numbers from 0 to 1 by a seed, which alone decides them (mulberry32).
function randomBy(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let bits = Math.imul(state ^ (state >>> 15), state | 1);
    bits ^= bits + Math.imul(bits ^ (bits >>> 7), bits | 61);
    return ((bits ^ (bits >>> 14)) >>> 0) / 2 ** 32;
  };
}

// The n most likely ids, the likeliest first.
function likeliest(probabilities, n) {
  const ids = [];
  for (let id = 0; id < probabilities.length; id++) {
    if (ids.length === n && probabilities[id] <= probabilities[ids[n - 1]]) continue;
    let rank = ids.length;
    while (rank > 0 && probabilities[ids[rank - 1]] < probabilities[id]) rank -= 1;
    ids.splice(rank, 0, id);
    if (ids.length > n) ids.pop();
  }
  return ids;
}

// A tokenizer of characters, or of BPE over bytes.
class Tokenizer {
  constructor({ words, merges, pattern, normalizes, unit, special, start, ends }) {
    Object.assign(this, { unit, special, start, normalizes, ends: new Set(ends) });
    this.words = words.map((word) => Uint8Array.from(word, (byte) => byte.charCodeAt(0)));
    this.idOfWord = new Map(words.map((word, id) => [word, id]).filter(([word]) => word).reverse());
    this.pattern = new RegExp(pattern, "gu");
    this.merges = new Map(); // a pair of ids as one number: its rank, and the id of both together
    for (let i = 0; i < merges.length; i += 3)
      this.merges.set(merges[i] * words.length + merges[i + 1], { rank: i, id: merges[i + 2] });
  }

  // The ids of a text. Throws an Error that names characters which the model does not know.
  encode(text) {
    if (this.normalizes) text = text.normalize("NFC");
    const ids = [];
    for (const [piece] of text.matchAll(this.pattern)) ids.push(...this.encodePiece(piece));
    const unknown = [...text].filter((character) => this.unit === "characters" &&
      !this.idOfWord.has(byteString(character)));
    if (unknown.length)
      throw new Error(`The model does not know ${[...new Set(unknown)].join(" ")}`);
    return ids;
  }

  encodePiece(piece) {
    const bytes = byteString(piece);
    if (this.unit === "characters") return [this.idOfWord.get(bytes)];
    const ids = Array.from(bytes, (byte) => this.idOfWord.get(byte));
    let next = this.firstMerge(ids);
    while (next) {
      ids.splice(next.index, 2, next.merge.id);
      next = this.firstMerge(ids);
    }
    return ids;
  }

  // The merge of the lowest rank that two neighbors have, and where they are; null if none has one.
  firstMerge(ids) {
    let first = null;
    for (let index = 0; index + 1 < ids.length; index++) {
      const merge = this.merges.get(ids[index] * this.words.length + ids[index + 1]);
      if (merge && (!first || merge.rank < first.merge.rank)) first = { index, merge };
    }
    return first;
  }

  // The ids of a message, in ChatML.
  encodeMessage({ role, content }) {
    return [this.special["<|im_start|>"], ...this.encode(`${role}\n${content}`),
      this.special["<|im_end|>"], ...this.encode("\n")];
  }

  // What a model reads of a conversation, and how many of its oldest messages are left out; one of
  // the system, which is the first, stays.
  encodeConversation(messages, contextSize, nNew) {
    const answer = [this.special["<|im_start|>"], ...this.encode("assistant\n")];
    const isInstructed = messages[0].role === "system";
    const instruction = isInstructed ? this.encodeMessage(messages[0]) : [];
    const others = messages.slice(isInstructed ? 1 : 0);
    const turns = others.map((message) => this.encodeMessage(message));
    const room = contextSize - Math.min(nNew, Math.floor(contextSize / 4)) - answer.length
      - instruction.length;
    // A conversation begins with its first message, or with a later one of the user.
    const starts = Array.from(turns.keys()).filter((i) => i === 0 || others[i].role === "user");
    const nDropped = starts.find((start) => turns.slice(start).flat().length <= room);
    if (nDropped === undefined) {
      const share = isInstructed ? `, of which the instruction takes ${instruction.length}` : "";
      throw new Error(`The message is too long for a context of ${contextSize} tokens${share}.`);
    }
    return { ids: [...instruction, ...turns.slice(nDropped).flat(), ...answer], nDropped };
  }
}

// The UTF-8 bytes of a text, each as a character.
function byteString(text) {
  return String.fromCharCode(...new TextEncoder().encode(text));
}
