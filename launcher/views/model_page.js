// -- the page ---------------------------------------------------------------------------------

const find = (id) => document.getElementById(id);
const TURN = 25; // milliseconds of computing until the browser may draw
const LONGEST_TURN = 100; // where drawing takes long
const REPORT = 100; // milliseconds between two reports of the speed
const N_LIKELY = 5;

function append(parent, name, className = "", text = "") {
  const element = document.createElement(name);
  element.className = className;
  element.textContent = text;
  parent.append(element);
  return element;
}

// A function that lets the browser draw if TURN has passed since it last did. On a slow machine,
// where drawing takes longer than that, two thirds of the time are left for computing. A second
// model computes in the pauses of the first, so turns have a limit.
function pacer() {
  let turnEnd = performance.now() + TURN;
  return async () => {
    if (performance.now() < turnEnd) return;
    const began = performance.now();
    await new Promise((resolve) => setTimeout(resolve));
    const now = performance.now();
    turnEnd = now + Math.min(Math.max(TURN, 2 * (now - began)), LONGEST_TURN);
  };
}

// A model that the browser computes.
class BrowserModel {
  constructor(header, tensors) {
    this.model = new Model(header, tensors);
    this.tokenizer = new Tokenizer(header.tokenizer);
  }

  // The tokens that continue a prompt or answer messages, and how many messages are not seen.
  // Throws an Error if the model cannot read the text.
  async start(request, signal) {
    const { prompt, messages } = request;
    if (!messages) {
      const ids = prompt ? this.tokenizer.encode(prompt) : [this.tokenizer.start];
      return { tokens: this.write(ids, request, signal), nDropped: 0 };
    }
    const { block_size } = this.model.config;
    const { ids, nDropped } = this.tokenizer.encodeConversation(messages, block_size, request.length);
    const length = Math.min(request.length, block_size - ids.length); // no question slides out
    return { tokens: this.write(ids, { ...request, length }, signal), nDropped };
  }

  async *write(ids, request, signal) {
    const drawIfDue = pacer();
    for (const _ of this.model.read(ids)) {
      await drawIfDue();
      if (signal.aborted) return;
    }
    const random = randomBy(request.seed);
    const decoder = new TextDecoder();
    for (let n = 1; n <= request.length; n++) {
      const id = draw(this.model.logits, request, random);
      if (this.tokenizer.ends.has(id)) break;
      const bytes = this.tokenizer.words[id] ?? new Uint8Array();
      yield { text: decoder.decode(bytes, { stream: true }), likely: this.likely(id) };
      await drawIfDue();
      if (signal.aborted) return;
      if (n < request.length) this.model.forward(id);
    }
    const rest = decoder.decode();
    if (rest) yield { text: rest, likely: [] }; // a character that has not ended
  }

  // The likeliest tokens where one was drawn, and that one, which comes last if it is none of them.
  likely(drawnId) {
    const probabilities = softmax(this.model.logits);
    const ids = likeliest(probabilities, N_LIKELY);
    if (!ids.includes(drawnId)) ids.push(drawnId);
    return ids.map((id) =>
      ({ text: this.visible(id), probability: probabilities[id], isDrawn: id === drawnId }));
  }

  visible(id) {
    const word = this.tokenizer.words[id];
    if (this.tokenizer.ends.has(id) || !word?.length) return "end of the text";
    return new TextDecoder().decode(word).replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥");
  }
}

// A model that the server computes, which answers by its API. What was likely is not in its answers.
class ServedModel {
  constructor({ served }) {
    this.name = served.name;
  }

  async start({ prompt, messages, length, topK, topP, ...request }, signal) {
    const body = { ...request, model: this.name, max_tokens: length, top_k: topK, top_p: topP, stream: true };
    Object.assign(body, messages ? { messages } : { prompt });
    const path = messages ? "v1/chat/completions" : "v1/completions";
    const response = await fetch(`${path}${location.search}`,
      { method: "POST", body: JSON.stringify(body), signal });
    if (!response.ok) throw new Error((await response.json()).error.message);
    return { tokens: this.read(response.body), nDropped: 0 };
  }

  async *read(stream) {
    let incomplete = "";
    for await (const content of stream.pipeThrough(new TextDecoderStream())) {
      const events = (incomplete + content).split("\n\n");
      incomplete = events.pop();
      for (const event of events) {
        if (event === "data: [DONE]") return;
        const { error, choices } = JSON.parse(event.replace(/^data: /, ""));
        if (error) throw new Error(error.message);
        yield { text: choices[0].text ?? choices[0].delta.content ?? "", likely: [] };
      }
    }
  }
}

// A model on the page, with the text that it writes, or its conversation.
class Column {
  constructor(header, model) {
    this.header = header;
    this.model = model;
    this.messages = []; // of a conversation
    this.article = find("column").content.firstElementChild.cloneNode(true);
    this.text = this.part("text");
    this.text.ariaLabel = `Text of ${header.title}`;
    if (header.chats) this.text.classList.add("conversation");
    this.part("name").textContent = header.title;
    this.part("facts").textContent = this.facts();
    this.about = this.describe(header.card);
    this.clear();
  }

  // A box with what the page says of the model, by label. It stands below all texts.
  describe(card) {
    const box = find("about").content.firstElementChild.cloneNode(true);
    for (const [label, text] of Object.entries(card)) {
      const row = append(box.querySelector("table"), "tr");
      append(row, "th", "", label).scope = "row";
      append(row, "td", "", text);
    }
    return box;
  }

  part(className) {
    return this.article.querySelector(`.${className}`);
  }

  facts() {
    const { n_parameters, tokenizer, slow, served } = this.header;
    const unit = tokenizer.unit === "characters" ? "characters" : "subword tokens";
    let facts = `a GPT of ${n_parameters.toLocaleString("en")} parameters that writes ${unit}`;
    if (slow) facts += "; it is large, and writes slowly in a browser";
    if (served) facts += `; the server computes it, without showing what was likely: ${served.reason}`;
    return facts;
  }

  report(text, kind = "") { // "", "progress", which is not read aloud, or "error"
    const status = this.part("status");
    status.ariaLive = kind === "progress" ? "off" : "polite";
    status.textContent = text;
    status.className = `status ${kind}`;
  }

  clear() {
    this.messages = [];
    this.text.replaceChildren();
    this.text.dataset.empty = this.header.chats ? "Say something to the model." : "Nothing is written yet.";
    this.report("");
  }

  // Removes the newest question and its answer, if they are still there.
  takeBack() {
    if (!this.newest?.element.isConnected) return;
    const { element, nMessages } = this.newest;
    if (this.header.chats) element.previousElementSibling.remove();
    element.remove();
    this.messages.length = nMessages;
  }

  // Shows what the model continues or answers. Returns the element for its text.
  show(prompt) {
    if (!this.messages.length) this.text.replaceChildren();
    if (this.header.chats) {
      append(this.text, "div", "question", prompt);
      return append(this.text, "div", "answer");
    }
    if (prompt) append(this.text, "span", "prompt", prompt);
    return append(this.text, "span");
  }

  // Marks the first message that the model still sees.
  showDropped(nDropped) {
    this.part("forgotten")?.remove();
    if (!nDropped) return;
    const line = append(this.text, "div", "forgotten", "The model no longer sees what is above.");
    this.text.querySelectorAll(".question, .answer")[nDropped].before(line);
  }

  // Writes after the prompt of these settings, until its end or until the signal.
  async write(settings, signal) {
    const element = this.show(settings.prompt);
    this.newest = { element, nMessages: this.messages.length };
    this.scroll();
    this.report("reading the prompt", "progress");
    const startTime = performance.now();
    let problem = "";
    try {
      await this.appendTokens(element, settings, signal, startTime);
    } catch (error) {
      const isGone = this.header.served && error instanceof TypeError;
      problem = isGone ? "The server does not answer." : error.message;
    }
    if (!element.isConnected) return; // another text is there
    const text = element.textContent;
    const summary = speed(text.length, startTime, settings.seed);
    if (signal.aborted) this.report(`stopped: ${summary}`);
    else if (problem) this.report(problem, "error");
    else this.report(text ? summary : "The text is empty.");
    if (this.header.chats) this.endTurn(element, settings.prompt, text);
  }

  // What the model gets: the settings with the prompt, or with the messages of a conversation.
  requestOf({ prompt, system, stop, ...settings }) {
    if (!this.header.chats) return { ...settings, prompt };
    const instruction = system.trim() ? [{ role: "system", content: system }] : [];
    const question = { role: "user", content: prompt };
    return { ...settings, messages: [...instruction, ...this.messages, question] };
  }

  // Appends what the model writes to an element, until the stop string or the end of the text.
  async appendTokens(element, settings, signal, startTime) {
    const { tokens, nDropped } = await this.model.start(this.requestOf(settings), signal);
    this.showDropped(nDropped);
    const { stop, seed } = settings;
    let written = "";
    let reportTime = startTime;
    let follows = true; // the newest token is kept in sight, until one scrolls up
    for await (const { text, likely } of tokens) {
      const isDue = performance.now() > reportTime; // to measure what is drawn takes long
      if (isDue) follows = this.isAtEnd();
      if (text) {
        const span = append(element, "span", "token", text);
        span.tabIndex = -1;
        span.likely = likely;
      }
      written += text;
      if (stop && written.includes(stop)) {
        cut(element, written.indexOf(stop));
        break;
      }
      if (isDue) {
        if (follows) this.scroll();
        this.report(speed(written.length, startTime, seed), "progress");
        reportTime = performance.now() + REPORT;
      }
    }
    if (follows) this.scroll();
  }

  // Adds a question and its answer to the messages. One without an answer can be asked again.
  endTurn(element, question, answer) {
    if (answer) {
      this.messages.push({ role: "user", content: question }, { role: "assistant", content: answer });
      return;
    }
    element.previousElementSibling.remove();
    element.remove();
    find("prompt").value ||= question;
  }

  isAtEnd() {
    return this.text.scrollHeight - this.text.scrollTop - this.text.clientHeight < 80;
  }

  scroll() {
    this.text.scrollTop = this.text.scrollHeight;
  }
}

// How much was written since a time, and how fast.
function speed(nCharacters, startTime, seed) {
  const perSecond = nCharacters / (performance.now() - startTime) * 1000;
  const rate = perSecond.toLocaleString("en", { maximumFractionDigits: perSecond < 10 ? 1 : 0 });
  return `${nCharacters.toLocaleString("en")} characters, ${rate} a second, seed ${seed}`;
}

// Leaves the first `length` characters of an element of tokens.
function cut(element, length) {
  while (element.textContent.length > length) {
    const last = element.lastElementChild;
    const nTooMany = element.textContent.length - length;
    if (nTooMany < last.textContent.length) last.textContent = last.textContent.slice(0, -nTooMany);
    else last.remove();
  }
}

function showLikely(span) {
  const box = find("likely");
  if (!span.likely?.length) return hideLikely();
  box.replaceChildren();
  for (const { text, probability, isDrawn } of span.likely) {
    const row = append(box, "div", isDrawn ? "chosen" : "");
    append(row, "code", "", text);
    const percent = (probability * 100).toFixed(probability < 0.1 ? 2 : 1);
    append(row, "span", "", percent === "0.00" ? "< 0.01 %" : `${percent} %`);
    row.style.setProperty("--share", `${probability * 100}%`);
  }
  append(box, "p", "", "The model's own probabilities; the bold one was drawn.");
  span.setAttribute("aria-describedby", "likely");
  box.hidden = false;
  const rectangle = span.getClientRects()[0];
  const fitsBelow = rectangle.bottom + 6 + box.offsetHeight < innerHeight;
  const left = Math.max(6, Math.min(rectangle.left, innerWidth - box.offsetWidth - 6));
  const top = fitsBelow ? rectangle.bottom + 6 : rectangle.top - box.offsetHeight - 6;
  box.style.left = `${left}px`;
  box.style.top = `${top}px`;
}

function hideLikely() {
  find("likely").hidden = true;
}

// What was likely stays beside the token that the keyboard has reached, which may scroll into view.
function followFocus() {
  const token = document.querySelector(".token:focus-visible");
  if (token) showLikely(token);
  else hideLikely();
}

// The whole number in a field of the form. A field with none, or with one below `min`, shows the
// default from now on.
function readWholeNumber(id, min, defaultValue) {
  const field = find(id);
  const value = Math.floor(Number(field.value));
  if (field.value.trim() && value >= min) return value;
  field.value = defaultValue;
  return defaultValue;
}

function readSettings() {
  const escapes = { n: "\n", t: "\t" };
  const isSeeded = find("seed").value.trim();
  return {
    prompt: find("prompt").value,
    temperature: Number(find("temperature").value),
    length: readWholeNumber("length", 1, 500),
    topK: readWholeNumber("top-k", 0, 0),
    topP: Number(find("top-p").value),
    seed: isSeeded ? readWholeNumber("seed", 0, 0) : Math.floor(Math.random() * 2 ** 31),
    stop: find("stop").value.replace(/\\([nt\\])/g, (_, name) => escapes[name] ?? name),
    system: find("system").value,
  };
}

class Page {
  constructor(columns) {
    this.columns = columns;
    this.chats = columns.some((column) => column.header.chats);
    this.controller = null; // of the texts that are written
    this.settings = null; // with which they are
  }

  describe() {
    find("columns").append(...this.columns.map((column) => column.article));
    find("abouts").append(...this.columns.map((column) => column.about));
    document.title = this.columns.map((column) => column.header.title).join(", ");
    if (this.columns.length > 1) this.describeSeveral();
    else this.describeOne();
    if (this.chats) this.arrangeAsChat();
    if (this.columns.every((column) => column.header.tokenizer.unit === "characters"))
      find("length-label").textContent = "Characters at most";
    find("write").disabled = false;
    find("prompt").focus({ preventScroll: true });
  }

  describeOne() {
    const [column] = this.columns;
    find("title").textContent = column.header.title;
    find("facts").textContent = column.facts();
    column.article.querySelector("header").hidden = true;
  }

  describeSeveral() {
    const task = this.chats ? "the same message, answered" : "the same prompt, continued";
    find("title").textContent = "Side by side";
    find("facts").textContent = `${task} by ${this.columns.length} models`;
    document.body.classList.add("several");
    for (const { about, header } of this.columns)
      about.querySelector("summary").textContent = `About ${header.title}`;
  }

  arrangeAsChat() {
    find("columns").after(find("form")); // a message is typed below the conversation
    find("prompt-label").textContent = "Message";
    find("prompt").rows = 2;
    find("prompt").placeholder = "Shift+Enter breaks the line";
    find("write").textContent = "Send";
    find("anew").hidden = false;
    find("system").parentElement.hidden = false;
  }

  async write() {
    this.stop();
    hideLikely();
    const settings = readSettings();
    if (this.chats) {
      if (!settings.prompt.trim()) return;
      find("prompt").value = "";
    }
    await this.writeBy(settings);
  }

  // Writes the newest text again: by the same seed, and in a conversation to the same message.
  async rewrite() {
    this.stop();
    hideLikely();
    if (!this.settings && this.chats) return;
    const settings = readSettings();
    if (this.settings) settings.seed = this.settings.seed;
    if (this.chats) settings.prompt = this.settings.prompt;
    for (const column of this.columns) column.takeBack();
    await this.writeBy(settings);
  }

  async writeBy(settings) {
    this.settings = settings;
    const controller = new AbortController();
    this.controller = controller;
    find("end").disabled = false;
    await Promise.all(this.columns.map((column) => column.write(settings, controller.signal)));
    if (this.controller === controller) find("end").disabled = true;
  }

  stop() {
    this.controller?.abort();
    find("end").disabled = true;
  }

  startAnew() {
    this.stop();
    this.settings = null;
    for (const column of this.columns) column.clear();
    find("prompt").focus();
  }

  listen() {
    find("form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.write();
    });
    find("end").addEventListener("click", () => this.stop());
    find("anew").addEventListener("click", () => this.startAnew());
    document.addEventListener("keydown", (event) => this.pressKey(event));
    for (const slider of document.querySelectorAll("form input[type=range]"))
      slider.addEventListener("input", () => {
        find(`${slider.id}-value`).textContent = slider.value;
      });

    const texts = find("columns");
    for (const kind of ["click", "mouseover", "focusin"])
      texts.addEventListener(kind, (event) => showLikely(event.target));
    texts.addEventListener("mouseleave", hideLikely);
    texts.addEventListener("focusout", hideLikely);
    texts.addEventListener("keydown", moveToToken);
    document.addEventListener("scroll", followFocus, true);
  }

  pressKey(event) {
    const sends = this.chats && event.target.id === "prompt" && !event.shiftKey && !event.isComposing;
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey || sends)) {
      event.preventDefault();
      this.write();
    } else if (event.key === "Escape") {
      this.stop();
      hideLikely();
    }
  }
}

// Arrow keys go from a text to its first token, and from token to token.
function moveToToken(event) {
  const sibling = { ArrowLeft: "previousElementSibling", ArrowRight: "nextElementSibling" }[event.key];
  if (!sibling) return;
  const isText = event.target.classList.contains("text");
  const token = isText ? event.target.querySelector(".token") : event.target[sibling];
  if (!token?.classList.contains("token")) return;
  event.preventDefault();
  token.focus();
}

async function checkModel(base64, sha256) {
  if (!globalThis.crypto?.subtle) return; // on pages of plain http; gzip has a checksum too
  const bytes = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
  const hexadecimal = Array.from(digest, (byte) => byte.toString(16).padStart(2, "0")).join("");
  if (hexadecimal !== sha256) throw new Error("its hash is not the one it was saved with");
}

async function ask(address) {
  const response = await fetch(`${address}${location.search}`);
  if (!response.ok) throw new Error((await response.json()).error.message);
  return new Uint8Array(await response.arrayBuffer());
}

// The bytes of a model: those in its block of the page, or those that the server has.
async function readModel(block) {
  const { address, sha256 } = block.dataset;
  if (address) return ask(address);
  await checkModel(block.textContent, sha256);
  const bytes = await decompress(block.textContent);
  block.remove();
  return bytes;
}

// Functions that read the weights of each moment but the last, which is the model: from its block of
// the page, or from the server.
function momentReaders(header, address) {
  if (!address) {
    const blocks = [...document.querySelectorAll("script.moment")];
    return blocks.map((block) => () => readMoment(block, header));
  }
  const earlier = (header.moments ?? []).slice(0, -1);
  return earlier.map((_, index) => async () => {
    const { tensors } = unpack(await ask(`${address}/moment/${index}`));
    return readTensors(header, tensors);
  });
}

async function open() {
  const columns = [];
  const modelBlocks = [...document.querySelectorAll(".model")];
  for (const block of modelBlocks) {
    if (block.dataset.address) find("origin").textContent = "Served by sm-nanogpt play.";
    const { header, tensors } = unpack(await readModel(block));
    const model = header.served ? new ServedModel(header) : new BrowserModel(header, tensors);
    columns.push(new Column(header, model));
  }
  const page = new Page(columns);
  page.describe();
  const [{ header, article, model }] = columns;
  const readers = momentReaders(header, modelBlocks[0].dataset.address);
  if (readers.length && columns.length === 1) new MomentSlider(page, article, model, header, readers);
  page.listen();
}

open().catch((error) => {
  find("facts").textContent = `This page cannot be used: ${error.message}.`;
  find("facts").className = "error";
});
