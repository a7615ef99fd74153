"""Read the documents of files, and survey them before they are uploaded."""

from __future__ import annotations

import hashlib
import logging
import re
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from sm_nanogpt.launcher.errors import InputError
from sm_nanogpt.launcher.models.encoder import MAX_PIECE
from sm_nanogpt.launcher.text.encodings import read_text
from sm_nanogpt.launcher.text.messengers import read_slack_people
from sm_nanogpt.launcher.text.reading import File, open_text
from sm_nanogpt.launcher.text.records import TextDocument, document_of
from sm_nanogpt.launcher.text.skipped import Skipped, Unlearnable
from sm_nanogpt.launcher.text.talks import Talk
from sm_nanogpt.launcher.values import counted

logger = logging.getLogger(__name__)

# The shortest context of any preset. Shorter text cannot fill one window for training and one in
# its last tenth for validation. A launch checks against the context of its job.
SHORTEST_BLOCK_SIZE = 64
MIN_CHARACTERS = 10 * (SHORTEST_BLOCK_SIZE + 1)
MAX_KINDS_SHOWN = 8


@dataclass(frozen=True)
class Suspicion:
    """A sign that a text was damaged before it came here."""

    pattern: bytes  # of the UTF-8 of a damaged text
    problem: str
    encoding: str = ""  # in which the original may be read, if one may help


SUSPICIONS = (
    Suspicion(
        rb"\xc2[\x80-\x9f]",
        "control characters (U+0080 to U+009F), as of Windows-1252 that was read as Latin-1; upload"
        " the original",
        "cp1252",
    ),
    Suspicion(
        rb"\xef\xbf\xbd",
        "U+FFFD, the sign for lost characters; upload the original",
        "NAME",
    ),
    Suspicion(
        rb"\xc3\x83\xc2[\x80-\xbf]|\xc3\xa2\xe2\x82\xac",
        "U+00C3 or U+00E2 before a sign, as of UTF-8 that was read as Windows-1252 ('Ã©' for 'é');"
        " upload the original",
    ),
    Suspicion(
        rb"\r[^\n]",
        r"carriage returns without line feeds; for line breaks: `tr '\r' '\n' < FILE > NEW-FILE`",
    ),
    Suspicion(
        rb"\x1b[\[\]]",
        "escape sequences, as of a terminal's colors, which a model learns too; with NO_COLOR=1"
        " most programs write none",
    ),
)


@dataclass
class Survey:
    """What one reading of a text has counted, and the SHA-256 of the files' names and contents."""

    documents: int = 0
    empty: int = 0  # documents that are left out
    chats: int = 0  # documents that are conversations
    characters: int = 0
    size: int = 0  # bytes of UTF-8
    sha256: str = ""
    vocabulary: str = ""  # the characters of a plain text; "" for documents
    files: list[File] = field(default_factory=list)  # files of a plain text that are kept
    suspicions: dict[Suspicion, str] = field(default_factory=dict)  # with their first positions
    skipped: Skipped = field(default_factory=Skipped)

    def note_suspicions(self, content: bytes, position: str) -> None:
        """Note the suspicions that a part of the text raises first, at its position."""
        if content.isascii() and b"\r" not in content and b"\x1b" not in content:
            return  # fast, as there may be many short turns
        for suspicion in SUSPICIONS:
            if suspicion not in self.suspicions and re.search(suspicion.pattern, content):
                self.suspicions[suspicion] = position

    def check(self, name: str) -> None:
        """Warn of suspicions, and of conversations that are left out.

        name: what errors call the text. Raises InputError if too many conversations are left out,
        or if the text is too short for any run.
        """
        self.skipped.check(self.chats)
        for suspicion, position in self.suspicions.items():
            extra = {}
            if suspicion.encoding:
                extra = {"code": "give-encoding", "encoding": suspicion.encoding}
            logger.warning(f"{position}: has {suspicion.problem}", extra=extra)
        if self.characters < MIN_CHARACTERS:
            problem = "has no text"
            if self.characters:
                problem = f"{self.characters} characters are too few to train and validate on"
            advice = f"use at least {MIN_CHARACTERS} characters, better a million"
            raise InputError(f"{name}: {problem}; {advice}")


# -- plain text ------------------------------------------------------------------------------------


def survey_text(name: str, files: Sequence[File]) -> Survey:
    """Read files of plain text as train.py would. Empty files and equal ones are left out.

    name: what errors call the text. Raises InputError as Survey.check does.
    """
    survey = Survey()
    digest = hashlib.sha256()
    vocabulary: set[str] = set()
    file_digests: set[bytes] = set()
    n_left_out: Counter[str] = Counter()
    for file in files:
        file_digest = hashlib.sha256()
        size = 0
        characters = 0
        with open_text(file) as content:
            for text in read_text(content, file.shown):
                chunk = text.encode()
                file_digest.update(chunk)
                vocabulary.update(text)
                survey.note_suspicions(chunk, file.shown)
                characters += len(text)
                size += len(chunk)
        sha256 = file_digest.digest()
        if size == 0:
            n_left_out["empty"] += 1
        elif sha256 in file_digests:
            n_left_out["equal to another"] += 1
        else:
            file_digests.add(sha256)
            digest.update(f"{file.name}\0".encode() + sha256)
            survey.files.append(file)
            survey.size += size
            survey.characters += characters
    survey.check(name)
    if n_left_out:
        logger.warning(list_left_out(n_left_out))
    survey.sha256 = digest.hexdigest()
    survey.vocabulary = "".join(sorted(vocabulary))
    return survey


def digest_of(files: Sequence[File]) -> str:
    """The SHA-256 of the names and contents of files, as survey_text computes it."""
    digest = hashlib.sha256()
    for file in files:
        with open_text(file) as content:
            sha256 = hashlib.file_digest(content, "sha256").digest()
        digest.update(f"{file.name}\0".encode() + sha256)
    return digest.hexdigest()


def list_left_out(counts: Counter[str]) -> str:
    """`27 files left out: 24 .md, 3 .py`, the most frequent kinds first."""
    kinds = [f"{count:,} {kind}" for kind, count in counts.most_common(MAX_KINDS_SHOWN)]
    if len(counts) > MAX_KINDS_SHOWN:
        kinds.append("others")
    return f"{counted(counts.total(), 'file')} left out: {', '.join(kinds)}"


# -- documents -------------------------------------------------------------------------------------


def survey_documents(files: Sequence[File]) -> Survey:
    """Read the documents of files once. Raises InputError if one cannot be read."""
    survey = Survey()
    deque(read_documents(files, survey), maxlen=0)  # reads all and keeps none
    if survey.empty:
        total = survey.documents + survey.empty
        logger.warning(f"{survey.empty:,} of {total:,} documents left out: no text")
    return survey


def read_documents(files: Sequence[File], survey: Survey) -> Iterator[str | None]:
    """Yield each document in pieces, with None at its end, and count it in an empty survey.

    A file of plain text is one document; of other files, each record is one. Empty documents are
    left out, and so are conversations from which no model can learn. Raises InputError.
    """
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0".encode())
        for document in documents_in(file, survey.skipped):
            size_before = survey.size
            for piece in document.pieces:
                content = piece.encode()
                if document.is_chat:  # the ends of turns count too
                    digest.update(len(content).to_bytes(8, "little"))
                digest.update(content)
                survey.note_suspicions(content, document.position)
                survey.characters += len(piece)
                survey.size += len(content)
                yield piece
            if survey.size == size_before:
                survey.empty += 1
                continue
            survey.documents += 1
            survey.chats += document.is_chat
            if survey.chats not in (0, survey.documents):
                problem = "some documents are conversations, and others are text"
                raise InputError(f"{document.position}: {problem}; leave out the files of one kind")
            digest.update(b"\0")
            yield None
    survey.sha256 = digest.hexdigest()


def documents_in(file: File, skipped: Skipped) -> Iterator[TextDocument]:
    """Yield the documents of a file.

    `skipped` gets the conversations from which no model can learn, and what is left out of talks.
    """
    reader = file.format.reader
    if reader is None:
        yield TextDocument(file.shown, False, read_pieces(file))
        return
    with open_text(file) as content:
        for position, record in reader(content, file):
            if isinstance(record, Talk):
                if record.people_file:
                    record.name_people(read_slack_people(file.path.parent / record.people_file))
                for turns in skipped.talks.turns_of(record, position, file.me):
                    yield TextDocument(position, True, iter(turns))
                continue
            try:
                yield document_of(record, position, file.column)
            except Unlearnable as error:
                skipped.add(error, position)


def read_pieces(file: File) -> Iterator[str]:
    """Yield a plain text in pieces of at most MAX_PIECE characters.

    A piece ends at a line break if its second half has one.
    """
    text = ""
    with open_text(file) as content:
        for chunk in read_text(content, file.shown):
            text += chunk
            while len(text) > MAX_PIECE:
                end = text.rfind("\n", MAX_PIECE // 2, MAX_PIECE) + 1 or MAX_PIECE
                yield text[:end]
                text = text[end:]
    if text:
        yield text
