"""Files that hold more than text: what of them is read."""

from __future__ import annotations

from pathlib import Path

from sm_nanogpt.launcher.text.documents import read_pieces
from sm_nanogpt.launcher.text.reading import detect_file

PAGE = """\
<!doctype html>
<html><head><title>Tea</title><style>p { color: red }</style></head>
<body><!-- a note --><h1>Tea  &amp; cake</h1>
<p>Pour the <b>hot</b> water,
and wait.</p><script>alert("no")</script>
<ul><li>One</li><li>Two<br>three</li></ul>
<pre>a
  b</pre></body></html>
"""
SRT = """\
\ufeff1\r
00:00:01,000 --> 00:00:02,500\r
<i>Who's there?</i>\r
\r
2\r
00:00:03,000 --> 00:00:04,000\r
{\\an8}Nay, answer me.\r
Stand!\r
"""
VTT = """\
WEBVTT - a play

NOTE
made by hand

STYLE
::cue { color: red }

intro
00:01.000 --> 00:02.500 align:start
<v Bernardo>Who's there?

00:03.000 --> 00:04.000
Who's there?
<00:03.500><c>Nay, answer me.</c>

00:05.000 --> 00:06.000
Stand!
"""
MBOX = """\
From ann@example.org Tue Mar 12 14:05:00 2024
From: Ann <ann@example.org>
Subject: Tea
MIME-Version: 1.0
Content-Type: text/plain; charset="iso-8859-1"
Content-Transfer-Encoding: quoted-printable

Caf=E9 at four?
>From now on, yes.

--=20
Ann

From bob@example.org Tue Mar 12 15:05:00 2024
From: Bob <bob@example.org>
Content-Type: multipart/mixed; boundary="b"

--b
Content-Type: text/html; charset="utf-8"

<p>Gladly.</p>
--b
Content-Type: application/pdf; name="a.pdf"
Content-Transfer-Encoding: base64

AAAA
--b--

From ann@example.org Tue Mar 12 16:05:00 2024
From: Ann <ann@example.org>

Good.

On Tue, Mar 12, 2024 at 3:05 PM Bob <bob@example.org> wrote:

> Gladly.
"""


def text_of(path: Path, content: str) -> str:
    path.write_bytes(content.encode())
    return "".join(read_pieces(detect_file(path)))


def test_a_page_is_read_as_a_browser_shows_it(tmp_path):
    text = "Tea & cake\nPour the hot water, and wait.\nOne\nTwo\nthree\na\n  b\n"
    assert text_of(tmp_path / "tea.txt", PAGE) == text


def test_subtitles_are_read_without_their_times(tmp_path):
    text = "Who's there?\nNay, answer me.\nStand!\n"
    assert text_of(tmp_path / "a.srt", SRT) == text
    assert text_of(tmp_path / "a.vtt", VTT) == text


def test_mail_is_read_without_what_it_quotes(tmp_path):
    text = "Café at four?\nFrom now on, yes.\n\nGladly.\n\nGood.\n\n"
    assert text_of(tmp_path / "Sent", MBOX) == text


def test_what_is_left_out_of_mail_is_counted(tmp_path, caplog):
    silent = "From cat@example.org Tue Mar 12 17:05:00 2024\nFrom: Cat <cat@example.org>\n\n\n"
    text_of(tmp_path / "mail.mbox", f"{MBOX}\n{silent}")
    assert caplog.messages == [
        "left out of mail: line of quotes and signatures (4), attachment (1), mail without text (1)"
    ]


def test_a_page_in_another_encoding_needs_its_name(tmp_path):
    path = tmp_path / "a.html"
    path.write_bytes("<p>Café, très bien</p>".encode("cp1252"))
    assert "".join(read_pieces(detect_file(path, encoding="cp1252"))) == "Café, très bien\n"
