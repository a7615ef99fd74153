"""Pages of six small models, and the ids that our sampler writes with each, for the tests of views
in Node.js and in a browser."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import torch
from models import lively, tokenizer_of

from sm_nanogpt.entry_point.config import Config
from sm_nanogpt.entry_point.model import GPT
from sm_nanogpt.entry_point.text import Tokenizer
from sm_nanogpt.launcher.models.chat import Chat, Message
from sm_nanogpt.launcher.models.engine import generate
from sm_nanogpt.launcher.models.quantization import quantize_model, with_quantized_weights
from sm_nanogpt.launcher.models.sample import encode_prompt
from sm_nanogpt.launcher.text.tokenizer import END_OF_TEXT
from sm_nanogpt.launcher.views.model_page import page_of

LETTERS = tokenizer_of("abcdefghij\n")
N_IDS = 300  # far beyond the contexts of the models here
QUESTION = "How are you?"

SMALL = Config(n_layer=2, n_head=2, n_embd=16, block_size=8)
WIDER = Config(n_layer=2, n_head=2, n_embd=32, block_size=64)
CONFIGS = {
    "characters": SMALL,
    "grouped heads": Config(n_layer=2, n_head=4, n_kv_head=2, n_embd=32, block_size=16),
    "tied head": Config(n_layer=1, n_head=2, n_embd=16, block_size=8, tie_embeddings=True),
    "norm weights": Config(n_layer=2, n_head=2, n_embd=16, block_size=8, norm_weights=True),
    "BPE": WIDER,
    "conversations": WIDER,
}

# The `count` likeliest ids in turn after a prompt, by `model` of the page.
GREEDY = """(() => {
  const ids = [];
  for (const _ of model.read(%s));
  while (ids.length < %d) {
    ids.push(argmax(model.logits));
    model.forward(ids.at(-1));
  }
  return ids;
})()"""


@dataclass(frozen=True)
class PageCase:
    """A model, its page, an expression of JavaScript for the ids of a prompt, and these ids."""

    model: GPT
    tokenizer: Tokenizer
    prompt_code: str
    prompt: list[int]

    @property
    def page(self) -> str:
        weights = {name: weight.detach() for name, weight in self.model.named_parameters()}
        return page_of(self.model, weights, self.tokenizer, "a model", {})

    @property
    def greedy_code(self) -> str:
        return GREEDY % (self.prompt_code, N_IDS)

    @property
    def greedy_ids(self) -> list[int]:
        return greedy_ids(self.model, self.prompt, N_IDS)

    def rounded(self, bits: int) -> tuple[str, list[int]]:
        """The page with rounded weights, and the greedy ids of our engine with the same."""
        parameters = quantize_model(self.model, bits)
        page = page_of(self.model, parameters, self.tokenizer, "a model", {})
        model = with_quantized_weights(self.model, parameters)
        return page, greedy_ids(model, self.prompt, N_IDS)


def page_case(name: str, bpe: Tokenizer) -> PageCase:
    """The model of a name in CONFIGS; bpe is the tokenizer of those that write tokens."""
    config = CONFIGS[name]
    if name not in ("BPE", "conversations"):
        return PageCase(lively(config), LETTERS, "[3, 1, 4, 1, 5]", [3, 1, 4, 1, 5])
    tokenizer = Tokenizer(bpe.document, END_OF_TEXT, chats=name == "conversations")
    model = lively(config, vocabulary_size=len(tokenizer))
    if name == "BPE":
        prompt = encode_prompt(tokenizer, QUESTION, config.block_size)
        return PageCase(model, tokenizer, f"tokenizer.encode({json.dumps(QUESTION)})", prompt)
    messages = json.dumps([{"role": "user", "content": QUESTION}])
    code = f"tokenizer.encodeConversation({messages}, {config.block_size}, 1).ids"
    prompt = Chat(model, tokenizer).fit([Message("user", QUESTION)], 1).ids
    return PageCase(model, tokenizer, code, prompt)


def greedy_ids(model: GPT, prompt: list[int], count: int) -> list[int]:
    ids = generate(model, torch.tensor([prompt]), count, temperature=0.0)
    return [int(id) for id in ids]


def with_model(page: str, code: str) -> str:
    """An expression of JavaScript that opens the model of a page, as `model` with its `tokenizer`
    and `header`, and gives what `code` gives, once the script of a page is there."""
    (packed,) = re.findall(r'class="model"[^>]*>([^<]*)<', page)
    return f"""(async () => {{
        const {{ header, tensors }} = unpack(await decompress({json.dumps(packed)}));
        const model = new Model(header, tensors);
        const tokenizer = new Tokenizer(header.tokenizer);
        return {code};
    }})()"""
