"""Read and write an object or a prefix on S3, for storage.py."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import fsspec

from sm_nanogpt.entry_point.files import check_size, file_sha256
from sm_nanogpt.launcher.aws import raise_offline
from sm_nanogpt.launcher.errors import ServiceError
from sm_nanogpt.launcher.files.progress import Progress
from sm_nanogpt.launcher.settings import Settings

PART_BYTES = 1 << 24
PARALLEL_PARTS = 8


class S3Location:
    """An object or a prefix on S3. Raises Offline in a dry run."""

    def __init__(self, uri: str, settings: Settings) -> None:
        if settings.offline:
            raise_offline()
        self.uri = uri
        self.fs = s3_file_system(settings)
        self.key: str = self.fs._strip_protocol(uri)  # bucket/key; `::` chains no URLs here

    @property
    def file_system(self) -> tuple[Any, str]:
        """fsspec's file system, and the path in it."""
        return self.fs, self.key

    def write_bytes(self, content: bytes) -> None:
        self.fs.pipe_file(self.key, content)  # creates no bucket

    def write_file(self, source: Path, progress: Progress) -> None:
        """Upload a file in parallel parts, each with a checksum.

        The object's metadata holds the SHA-256 of the file.
        """
        metadata = {"sha256": file_sha256(source)}
        self.fs.put_file(str(source), self.key, Metadata=metadata, **transfer_options(progress))

    def read_bytes(self, max_bytes: int) -> bytes:
        try:
            content = bytes(self.fs.cat_file(self.key, start=0, end=max_bytes + 1))
        except OSError as error:
            if "InvalidRange" in str(error.__cause__):  # an empty object has no range of bytes
                return b""
            raise
        return check_size(content, max_bytes, self.uri)

    def fingerprint(self) -> str:
        etag = str(self.fs.info(self.key, refresh=True)["ETag"])
        return hashlib.sha256(etag.encode()).hexdigest()

    def fetch_file(self, name: str, target: Path, progress: Progress) -> None:
        """Download an object below this prefix; if name is '', this object itself.

        Raises ServiceError if the file has another size or SHA-256 than the object.
        """
        key = f"{self.key}/{name}".removesuffix("/")
        self.fs.get_file(key, str(target), **transfer_options(progress))
        size = self.fs.info(key)["size"]
        sha256 = self.fs.metadata(key).get("sha256")
        if target.stat().st_size != size or (sha256 and file_sha256(target) != sha256):
            raise ServiceError(f"s3://{key}: the download is damaged; fetch it again")

    def remove(self) -> None:
        """Delete the object, or all objects below the prefix."""
        for key in self.fs.find(self.key):
            self.fs.rm_file(key)  # one by one, since a policy may allow only some keys


def s3_file_system(settings: Settings) -> Any:
    """The file system of fsspec for S3, with the same credentials and region as boto3.

    The options override the configuration of fsspec itself, which boto3 does not read. None stands
    for AWS's default.
    """
    client_options = {}
    encryption = {}
    if settings.aws_region:
        client_options = {"region_name": settings.aws_region}
    if settings.kms_key:
        encryption = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": settings.kms_key}
    return fsspec.get_filesystem_class("s3")(
        key=None,
        secret=None,
        token=None,
        username=None,
        password=None,
        endpoint_url=None,
        anon=False,
        profile=settings.profile or None,
        client_kwargs=client_options,
        config_kwargs={},
        s3_additional_kwargs=encryption,
        use_listings_cache=False,
    )


def transfer_options(progress: Progress) -> dict[str, Any]:
    """The arguments with which s3fs moves a file in parallel parts and reports its progress."""
    return {
        "callback": fsspec_callback(progress),
        "chunksize": PART_BYTES,
        "max_concurrency": PARALLEL_PARTS,
    }


def fsspec_callback(progress: Progress) -> fsspec.Callback:
    callback = fsspec.Callback()
    callback.relative_update = progress
    return callback
