"""Edits of the model whose logits depend on later tokens."""

from __future__ import annotations

EMBEDDED = "        x = self.embed(idx).to(self.compute_dtype)\n"
BLOCK = "        y = norm(x, self.attention_norm)\n"
LAYERS = "        for block in self.blocks:\n"
ATTENTION = "        dropout = self.dropout if self.training else 0.0\n"
LAST = "        x = norm(x, self.norm)\n"
KERNEL = "q, k, v, None, dropout, is_causal=True"
ALL = "torch.ones(q.size(2), q.size(2)).bool()"


def insert_after(anchor: str, code: str) -> tuple[str, str]:
    return anchor, f"{anchor}        {code}\n"


def insert_before(anchor: str, code: str) -> tuple[str, str]:
    return anchor, f"        {code}\n{anchor}"


LEAKS: dict[str, tuple[str, str]] = {
    "mask off by one": (KERNEL, f"q, k, v, {ALL}.tril(1), dropout"),
    "shift": insert_after(EMBEDDED, "x = x + 0.1 * x.roll(-1, 1)"),
    "window mean": insert_before(BLOCK, "x = x - x.mean(1, keepdim=True)"),
    "a thousandth of a value": insert_before(ATTENTION, "v = v + 1e-3 * v.roll(-1, 2)"),
    "one of ten positions": insert_after(
        EMBEDDED, "x = x + x.roll(-1, 1) * (torch.arange(x.size(1)) % 10 == 3)[:, None]"
    ),
    "after 100 tokens": insert_after(
        EMBEDDED, "x = torch.cat((x[:, :100], x[:, 100:] + x[:, 100:].roll(-1, 1)), dim=1)"
    ),
    "tokens chosen over time": insert_before(
        BLOCK, "x = x * (x[..., :1] >= x[..., :1].median(1, True)[0])"
    ),
}
