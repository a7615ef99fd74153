// -- the page ---------------------------------------------------------------------------------

const find = (id) => document.getElementById(id);
const TURN = 25; // milliseconds of computing until the browser may draw
const N_LIKELY = 5;

function append(parent, name, className = "", text = "") {
  const element = document.createElement(name);
  element.className = className;
  element.textContent = text;
  parent.append(element);
  return element;
}

function report(text, kind = "") { // "", "progress", which is not read aloud, or "error"
  find("status").ariaLive = kind === "progress" ? "off" : "polite";
  find("status").textContent = text;
  find("status").className = kind;
}

function speed(nTokens, began) {
  const perSecond = Math.round(nTokens / (performance.now() - began) * 1000);
  return `${nTokens.toLocaleString("en")} tokens, ${perSecond.toLocaleString("en")} a second`;
}

const nextTurn = () => new Promise((resolve) => setTimeout(resolve));

class Page {
  constructor(header, model, tokenizer) {
    this.header = header;
    this.model = model;
    this.tokenizer = tokenizer;
    this.messages = []; // of a conversation
    this.run = 0; // the number of the text that is written
  }

  describe() {
    document.title = this.header.title;
    find("title").textContent = this.header.title;
    const nParameters = this.header.tensors.reduce((sum, tensor) => sum + tensor.size, 0);
    const unit = this.tokenizer.unit === "characters" ? "characters" : "subword tokens";
    const slow = nParameters > 3e7 ? "; it is large, and writes slowly in a browser" : "";
    find("facts").textContent = `a GPT of ${nParameters.toLocaleString("en")} parameters that writes`
      + ` ${unit}${slow}`;
    for (const [label, text] of Object.entries(this.header.card)) {
      const row = append(find("card"), "tr");
      append(row, "th", "", label).scope = "row";
      append(row, "td", "", text);
    }
    if (this.header.chats) {
      document.body.className = "chat";
      find("prompt-label").textContent = "Message";
      find("prompt").placeholder = "Shift+Enter breaks the line";
      find("write").textContent = "Send";
      find("anew").hidden = false;
      find("text").dataset.empty = "Say something to the model.";
    }
    find("write").disabled = false;
  }

  // What the model reads, and the element that gets what it writes.
  begin(prompt, nNew) {
    if (!this.header.chats) {
      const ids = prompt ? this.tokenizer.encode(prompt) : [this.tokenizer.start];
      find("text").replaceChildren();
      if (prompt) append(find("text"), "span", "prompt", prompt);
      return { ids, nNew, element: append(find("text"), "span") };
    }
    const { block_size } = this.header.config;
    const messages = [...this.messages, { role: "user", content: prompt }];
    const { ids, nDropped } = this.tokenizer.encodeConversation(messages, block_size, nNew);
    if (!this.messages.length) find("text").replaceChildren();
    this.messages = messages;
    if (nDropped) report(`The model no longer sees the oldest ${nDropped} messages.`);
    append(find("text"), "div", "question", prompt);
    find("prompt").value = "";
    return { ids, nNew: Math.min(nNew, block_size - ids.length), element: append(find("text"), "div", "answer") };
  }

  async write() {
    const run = ++this.run;
    const prompt = find("prompt").value;
    const temperature = Number(find("temperature").value);
    const length = Math.max(1, Math.floor(Number(find("length").value)) || 500);
    hide();
    if (this.header.chats && !prompt.trim()) return report("Write a message first.");
    let start;
    try {
      start = this.begin(prompt, length);
    } catch (error) {
      return report(error.message, "error");
    }
    find("stop").disabled = false;
    report("reading the prompt", "progress");
    const text = await this.continueText(start, temperature, () => run === this.run);
    if (this.header.chats && text) this.messages.push({ role: "assistant", content: text });
    if (run === this.run) find("stop").disabled = true;
  }

  // Writes up to start.nNew tokens after start.ids while `isWanted` says true; returns the text.
  async continueText(start, temperature, isWanted) {
    let turnEnd = performance.now() + TURN;
    const drawIfDue = async () => {
      if (performance.now() < turnEnd) return;
      await nextTurn();
      turnEnd = performance.now() + TURN;
    };
    for (const _ of this.model.read(start.ids)) {
      await drawIfDue();
      if (!isWanted()) return "";
    }
    const decoder = new TextDecoder();
    const began = performance.now();
    let written = "";
    let nTokens = 0;
    while (nTokens < start.nNew) {
      const id = draw(this.model.logits, temperature);
      nTokens += 1;
      if (this.tokenizer.ends.has(id)) break;
      const piece = decoder.decode(this.tokenizer.words[id] ?? new Uint8Array(), { stream: true });
      written += piece;
      if (piece) this.addToken(start.element, piece, id);
      if (nTokens < start.nNew) this.model.forward(id);
      report(speed(nTokens, began), "progress");
      await drawIfDue();
      if (!isWanted()) break;
    }
    report(written ? speed(nTokens, began) : "The text is empty.");
    return written;
  }

  addToken(parent, piece, id) {
    const box = find("text");
    const isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    const span = append(parent, "span", "token", piece);
    span.tabIndex = -1;
    span.chosen = id;
    span.likely = likeliest(this.model.logits, N_LIKELY);
    if (!span.likely.some((token) => token.id === id))
      span.likely.push({ id, probability: softmax(this.model.logits)[id] });
    if (isAtEnd) box.scrollTop = box.scrollHeight;
  }

  stop() {
    this.run += 1;
    find("stop").disabled = true;
  }

  startAnew() {
    this.stop();
    this.messages = [];
    find("text").replaceChildren();
    report("");
  }

  visible(id) {
    const word = this.tokenizer.words[id];
    if (this.tokenizer.ends.has(id) || !word?.length) return "end of the text";
    return new TextDecoder().decode(word).replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥");
  }

  showLikely(span) {
    const box = find("likely");
    if (!span.likely) return hide();
    box.replaceChildren();
    for (const { id, probability } of span.likely) {
      const row = append(box, "div", id === span.chosen ? "chosen" : "");
      append(row, "code", "", this.visible(id));
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
}

function hide() {
  find("likely").hidden = true;
}

async function checkModel(base64, sha256) {
  if (!globalThis.crypto?.subtle) return; // on pages of plain http; gzip has a checksum too
  const bytes = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
  const hexadecimal = Array.from(digest, (byte) => byte.toString(16).padStart(2, "0")).join("");
  if (hexadecimal !== sha256) throw new Error("its hash is not the one it was saved with");
}

async function open() {
  const block = find("model");
  await checkModel(block.textContent, block.dataset.sha256);
  const { header, tensors } = await unpack(block.textContent);
  block.remove();
  const page = new Page(header, new Model(header, tensors), new Tokenizer(header.tokenizer));
  page.describe();
  find("form").addEventListener("submit", (event) => {
    event.preventDefault();
    page.write();
  });
  find("stop").addEventListener("click", () => page.stop());
  find("anew").addEventListener("click", () => page.startAnew());
  find("temperature").addEventListener("input", () => {
    find("temperature-value").textContent = find("temperature").value;
  });
  document.addEventListener("keydown", (event) => {
    const sends = header.chats && event.target.id === "prompt" && !event.shiftKey && !event.isComposing;
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey || sends)) {
      event.preventDefault();
      page.write();
    } else if (event.key === "Escape") {
      page.stop();
      hide();
    }
  });
  const text = find("text");
  for (const kind of ["click", "mouseover", "focusin"])
    text.addEventListener(kind, (event) => page.showLikely(event.target));
  text.addEventListener("mouseleave", hide);
  text.addEventListener("focusout", hide);
  document.addEventListener("scroll", hide, true);
  text.addEventListener("keydown", (event) => { // arrows go from token to token
    const sibling = { ArrowLeft: "previousElementSibling", ArrowRight: "nextElementSibling" }[event.key];
    if (!sibling) return;
    const isBox = event.target === text;
    const next = isBox ? text.querySelector(".token") : event.target[sibling];
    if (!next?.classList.contains("token")) return;
    event.preventDefault();
    next.focus();
  });
}

open().catch((error) => report(`This page cannot be used: ${error.message}.`, "error"));
