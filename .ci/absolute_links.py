"""Make the links of a page absolute: absolute_links.py README.md OWNER/REPOSITORY TAG

A package index shows README without the repository, so that relative links and pictures of it lead
nowhere. The release does this before it builds; README itself keeps links that work in any clone.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

LINK = re.compile(r"""(?<=\]\()[^)\s]+|(?<= src=")[^"]+|(?<= srcset=")[^"]+""")
IS_ABSOLUTE = re.compile(r"[a-z]+:|#")
PICTURES = (".png", ".svg")


def with_absolute_links(text: str, repository: str, tag: str) -> str:
    def absolute(link: re.Match[str]) -> str:
        path = link[0]
        if IS_ABSOLUTE.match(path):
            return path
        if path.endswith(PICTURES):
            return f"https://raw.githubusercontent.com/{repository}/{tag}/{path}"
        return f"https://github.com/{repository}/blob/{tag}/{path}"

    return LINK.sub(absolute, text)


if __name__ == "__main__":
    page, repository, tag = sys.argv[1:]
    path = Path(page)
    path.write_text(with_absolute_links(path.read_text("utf-8"), repository, tag), "utf-8")
