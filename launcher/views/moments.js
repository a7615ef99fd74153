// A slider over the training: the same prompt, written by the model as it was at each moment.

const MOMENT_SECONDS = 3; // that each text gets while one watches
const LABEL_GAP = 4; // pixels between two steps, at least

class MomentSlider {
  // `readers` read the weights of all moments but the last, which is the model itself.
  constructor(page, article, model, header, readers) {
    const finalWeights = model.model.weights;
    this.page = page;
    this.model = model;
    this.header = header;
    this.readers = [...readers, async () => finalWeights];
    this.moments = header.moments;
    this.box = article.querySelector(".moments");
    this.slider = this.box.querySelector("input");
    this.button = this.box.querySelector("button");
    this.watching = null; // the AbortController of the tour through all moments
    this.describe();
    this.slider.addEventListener("input", () => {
      this.stopWatching();
      this.choose(Number(this.slider.value));
    });
    this.button.addEventListener("click", () => this.toggleWatching());
    for (const id of ["write", "end", "anew"])
      find(id).addEventListener("click", () => this.stopWatching());
    document.addEventListener("keydown", (event) => { // which begin or stop a text
      const isKey = event.key === "Enter" || event.key === "Escape";
      if (isKey && event.target !== this.button) this.stopWatching();
    });
  }

  describe() {
    const last = this.moments.length - 1;
    this.box.hidden = false;
    this.slider.id = "moment";
    this.box.querySelector("label").htmlFor = "moment";
    this.slider.max = last;
    this.slider.value = last;
    this.steps = this.box.querySelector(".steps");
    this.labels = this.moments.map(({ step }, index) => {
      const label = append(this.steps, "span", "", step.toLocaleString("en"));
      label.style.left = `${index / last * 100}%`;
      return label;
    });
    new ResizeObserver(() => this.fitLabels()).observe(this.steps);
    this.drawCurve();
    this.show(last);
  }

  // Shows as many steps as fit beside each other, among them the first and the last.
  fitLabels() {
    const last = this.labels.length - 1;
    const widest = this.labels[last].offsetWidth + LABEL_GAP;
    const every = Math.ceil(widest * last / this.steps.clientWidth);
    this.labels.forEach((label, index) => {
      const isShown = index === last || (index % every === 0 && index + every <= last);
      label.hidden = !isShown;
    });
  }

  drawCurve() {
    const losses = this.moments.map((moment) => moment.loss);
    const curve = this.box.querySelector(".curve");
    if (losses.includes(null)) return curve.remove();
    const largest = Math.max(...losses);
    const smallest = Math.min(...losses);
    const points = losses.map((loss, index) => ({
      x: index / (losses.length - 1) * 100,
      y: 8 + (largest - loss) / (largest - smallest || 1) * 84,
    }));
    const line = points.map(({ x, y }) => `${x},${y}`).join(" L");
    curve.querySelector(".area").setAttribute("d", `M0,100 L${line} L100,100Z`);
    curve.querySelector(".line").setAttribute("d", `M${line}`);
    this.dots = points.map(({ x, y }) => {
      const dot = append(curve, "i");
      dot.style.left = `${x}%`;
      dot.style.top = `${y}%`;
      return dot;
    });
  }

  // Shows which moment it is.
  show(index) {
    const { generation, step, loss } = this.moments[index];
    const lastStep = this.moments.at(-1).step;
    let text = `step ${step.toLocaleString("en")} of ${lastStep.toLocaleString("en")}`;
    if (generation) text = `generation ${generation}, ${text}`; // each begins with random weights
    if (loss !== null) text += `, ${loss.toFixed(2)} bits per byte`;
    this.box.querySelector(".moment-text").textContent = text;
    this.slider.setAttribute("aria-valuetext", text);
    for (const marks of [this.labels, this.dots ?? []])
      marks.forEach((mark, position) => mark.classList.toggle("now", position === index));
  }

  // Writes the newest text again, with the weights of a moment.
  async choose(index) {
    this.index = index;
    this.show(index);
    this.page.stop();
    try {
      const weights = await this.readers[index]();
      if (this.index !== index) return; // another one was chosen
      this.readers[index] = async () => weights; // from now on
      this.model.model.weights = weights;
      this.model.model.clear();
    } catch (error) {
      return this.page.columns[0].report(`This moment cannot be read: ${error.message}.`, "error");
    }
    await this.page.rewrite();
  }

  toggleWatching() {
    if (this.watching) {
      this.page.stop();
      this.stopWatching();
    } else {
      this.watchTraining();
    }
  }

  // Goes through all moments, each for some seconds.
  async watchTraining() {
    this.watching = new AbortController();
    const { signal } = this.watching;
    this.button.textContent = "Stop watching";
    const last = this.moments.length - 1;
    for (let index = 0; index <= last; index++) {
      this.slider.value = index;
      const writing = this.choose(index);
      if (index < last) await new Promise((resolve) => setTimeout(resolve, MOMENT_SECONDS * 1000));
      else await writing;
      if (signal.aborted) return;
    }
    this.stopWatching();
  }

  stopWatching() {
    this.watching?.abort();
    this.watching = null;
    this.button.textContent = "Watch";
  }
}

// The weights in the block of a moment, which has the tensors of the model.
async function readMoment(block, header) {
  await checkModel(block.textContent, block.dataset.sha256);
  const { tensors } = unpack(await decompress(block.textContent));
  return readTensors(header, tensors);
}
