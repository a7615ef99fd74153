"""Read documents (JSON, TOML) and text that a user, another version or an attacker wrote.

A document is a regular file or an S3 object of at most LARGEST bytes. It is parsed into a pydantic
model, a dataclass or a typed dict, which enforces bounds. Pydantic's parser refuses nesting deeper
than 200 and integers of more than 4,300 digits.
"""

from __future__ import annotations

import codecs
import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import IO, Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from entry_point.files import read_file
from launcher.errors import InputError, ServiceError, must_be

T = TypeVar("T")

# Bytes; enough for the manifest of 50,000 files, or a tokenizer of 100,000 characters. The worst
# document of this size takes half a gigabyte and five seconds to refuse.
LARGEST = 1 << 21

Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Moment = Annotated[float, Field(ge=0, lt=253_402_300_800)]  # seconds since the epoch: to 9999
Integer = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
Number = Integer | Annotated[float, Field(allow_inf_nan=False)]
Scalar = Number | bool | str

# Those in which people have texts, by Python's names. Among all that it knows, charset_normalizer
# often prefers a rare one.
ENCODINGS = (
    *("cp1252", "cp1250", "cp1251", "koi8_r", "cp866", "cp1253", "cp1254", "cp1255", "cp1256"),
    *("mac_roman", "gb18030", "big5", "cp932", "euc_jp", "cp949", "utf_16_le", "utf_16_be"),
)


adapter: Callable[[Any], TypeAdapter[Any]] = lru_cache(TypeAdapter)


class Document(BaseModel):
    """Base class of our documents; numbers are finite."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)


class Damaged(ServiceError):
    """A document does not fit its model."""


def read_text(file: IO[bytes], name: object, size: int) -> Iterator[tuple[bytes, str]]:
    """Yield a UTF-8 text by `size` bytes, each with the characters that end in them."""
    decoder, position = codecs.getincrementaldecoder("utf-8")(), 0
    while chunk := file.read(size):
        content, at = chunk, chunk.find(0)
        try:
            text = decoder.decode(chunk)
        except UnicodeDecodeError as error:
            if at < 0:  # its object begins with what was left of a character
                content, at = error.object, error.start
        position += len(chunk)
        if at >= 0:
            raise not_text(name, content, at, position=position - len(content))
        yield chunk, text
    if decoder.getstate()[0]:
        raise InputError(f"{name}: is not UTF-8 text (it ends inside a character)")


def not_text(
    name: object, content: bytes, at: int, codec: str = "utf-8", position: int = 0
) -> InputError:
    """The error for content that is no text in a codec, at a byte of it: what it may be instead.

    position is that of the content in its file.
    """
    zeros = content[at] == 0
    begin = 0 if zeros else content.rfind(b"\n", 0, at) + 1
    guesses = [g for g in encodings_of(content[begin : begin + (1 << 16)]) if g != codec]
    if zeros and not any(guess.startswith("utf_16") for guess in guesses[:1]):
        return InputError(f"{name}: is a binary file (a zero at byte {position + at}), not text")
    what = f"{name}: is not {codec.upper()} text (byte {position + at})"
    if not guesses:
        return InputError(what)
    before = len(content[begin:at].decode(guesses[0], "ignore"))
    shown = content[begin : at + 80].decode(guesses[0], "ignore")
    words = " ".join(shown[max(0, before - 20) : before + 20].split())
    perhaps = f"perhaps {' or '.join(guesses[:2])}; in {guesses[0]} it reads {words!r}"
    return InputError(f"{what}, but {perhaps}", "give-encoding", encoding=guesses[0])


def encodings_of(content: bytes) -> list[str]:
    """The encodings that a text may have, the likeliest first."""
    import charset_normalizer

    found = charset_normalizer.from_bytes(content, cp_isolation=[*ENCODINGS])
    names = [name for match in found for name in match.could_be_from_charset]
    # Western Europe's, by far the more frequent, decodes most bytes to letters of the same weight.
    if names[:1] == ["cp1250"] and "cp1252" in names:
        names = ["cp1252", *names]
    return list(dict.fromkeys(names))


def parse(content: bytes | Mapping[str, Any], kind: type[T], name: object) -> T:
    """Validate a JSON document, as bytes or parsed, as `kind`. Raises Damaged, naming `name`."""
    fits: TypeAdapter[T] = adapter(kind)
    try:
        if isinstance(content, bytes):
            return fits.validate_json(content)
        return fits.validate_python(content)
    except ValidationError as error:
        reason = reason_of(error)
    except InputError as error:  # of a TrainingJob
        reason = str(error)
    raise Damaged(f"{name} is damaged, or of another version of sm-nanogpt ({reason})")


def reason_of(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    place = " ".join(".".join(map(str, first["loc"])).split())
    return f"{place}: {must_be(first['msg'])}".removeprefix(": ")


def read_toml(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(read_file(path, LARGEST).decode())
        json.dumps(values, default=str)  # fails for an integer that is too long for any message
        sections = [name for name, value in values.items() if isinstance(value, dict)]
        if not sections:
            return values
        why = f"has a section, [{sections[0]}]; delete this line"
    except OSError as error:
        why = str(error.strerror)
    except (ValueError, RecursionError) as error:
        why = f"not TOML: {error}"
    raise InputError(f"{path}: {why}")
