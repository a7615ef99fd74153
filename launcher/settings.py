"""Settings: from the command line, else SM_NANOGPT_* variables, else config.toml, else defaults."""

from __future__ import annotations

import os
import pwd
import re
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import Field, PrivateAttr, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from launcher.errors import InputError, did_you_mean, must_be
from launcher.values import plain


def default_home() -> Path:
    return expand_user(os.environ.get("SM_NANOGPT_HOME") or "~/.sm-nanogpt")


def expand_user(path: str | Path) -> Path:
    """The path, with the user's home directory in place of `~`.

    Raises InputError if there is none: no HOME, or an empty one, and no line in /etc/passwd, as
    a container's user of any number has none.
    """
    path = str(path)
    if path.startswith("~/") and not os.environ.get("HOME"):
        try:
            home = pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:
            home = ""
        if not home:
            why = "there is no home directory; set SM_NANOGPT_HOME to a directory, or HOME"
            raise InputError(f"{path}: {why}")
        return Path(home) / path.removeprefix("~/")
    return Path(os.path.expanduser(path))  # noqa: PTH111  (Path's refuses a file named ~notes.txt)


def config_file() -> Path:
    return default_home() / "config.toml"


PREFIX = "SM_NANOGPT_"

# Locations that do not depend on the current directory.
ABSOLUTE = re.compile(r"/|~|s3:|file:|arn:|[\w.+-]+://")

AWS_VARIABLES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_DEFAULT_REGION",
    "AWS_PROFILE",
    "AWS_REGION",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
)


class Settings(BaseSettings):
    """Where jobs, data and models are kept, and the defaults of jobs on SageMaker.

    home is the directory of everything on this machine: jobs/, models/, cache/, config.toml, and
    store/ unless another store is set. store is `s3://bucket/prefix` or an absolute directory.
    Raises InputError if a value is invalid, or the config file cannot be read.
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_ignore_empty=True, extra="forbid", frozen=True
    )

    home: Path = Field(default_factory=default_home)
    store: str = ""
    region: str = ""  # "": from the AWS configuration
    profile: str = ""
    role: str = ""  # ARN of the execution role
    # Its outputs provide store and role.
    stack: str = Field(default="sm-nanogpt", pattern=r"^[A-Za-z][A-Za-z0-9-]{0,127}$")
    max_cost: float | None = Field(default=None, gt=0, le=1e9, allow_inf_nan=False)  # USD per job
    ask_above: float = Field(default=10, ge=0)  # USD; ask before a launch that may cost more
    api_key: str = Field(default="", repr=False)  # of `play`; "": a new one each time
    kms_key: str = ""  # for objects in S3 and disks of jobs; "": the bucket's default

    # Defaults for jobs on SageMaker; names as in TrainingJob.
    subnets: list[str] = Field(default_factory=list)
    security_group_ids: list[str] = Field(default_factory=list)
    network_isolation: bool = False
    encrypt_traffic: bool = False
    tags: dict[str, str] = Field(default_factory=dict)

    _offline: bool = PrivateAttr(default=False)
    _sessions: dict[tuple[str, str, bool], Any] = PrivateAttr(default_factory=dict)  # of boto3

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**plain(values))
        except ValidationError as error:
            first = error.errors()[0]
            name, given = str(first["loc"][0]), first["input"]
            unknown = first["type"] == "extra_forbidden"
            meant = did_you_mean(name.lower(), type(self).model_fields, limit=1, cutoff=0)
            reason = f"there is no such setting; {meant}" if unknown else must_be(first["msg"])
            if name in values:
                raise InputError(reason, field=name, value=given) from None
            places = f"{PREFIX}{name.upper()}, or in {config_file()}"
            raise InputError(f"{name}={given!r} ({places}): {reason}") from None
        except SettingsError as error:
            named = re.search(r'field "(\w+)"', str(error))
            variable = f"{PREFIX}{named[1].upper()}" if named else str(error)
            raise InputError(f'{variable}: must be JSON, as ["a", "b"] or {{"a": "b"}}') from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InputError(f"{config_file()}: not TOML: {error}") from None

    @field_validator("store")
    @classmethod
    def _one_place(cls, store: str) -> str:
        problem = problem_of(store)
        if store and not ABSOLUTE.match(store):
            problem = "is relative to the current directory; start it with / or ~/"
        if problem:
            raise ValueError(problem)
        return store

    @field_validator("role")
    @classmethod
    def _arn(cls, role: str) -> str:
        if role and not re.fullmatch(r"arn:aws[a-z-]*:iam::\d{12}:role/.+", role):
            raise ValueError("must be an ARN, arn:aws:iam::ACCOUNT:role/NAME")
        return role

    @field_validator("home")
    @classmethod
    def _absolute(cls, home: Path) -> Path:
        return expand_user(home).absolute()

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], *_: Any, **sources: Any
    ) -> tuple[Any, ...]:
        file = None
        with suppress(InputError):  # without a home directory there is no file
            file = config_file()
        toml = TomlConfigSettingsSource(settings_cls, file)
        return sources["init_settings"], sources["env_settings"], toml

    def with_offline(self, offline: bool) -> Settings:
        """A copy for a dry run; or for what that asks all the same, such as an earlier job."""
        copy = self.model_copy()
        copy._offline = offline
        return copy

    @property
    def offline(self) -> bool:
        """Whether these are for a dry run: aws.make_client and files.storage raise NotAsked."""
        return self._offline

    @property
    def aws_region(self) -> str:
        """The region that was set; '' means that of the AWS configuration."""
        return self.region or os.environ.get("AWS_REGION", "")

    @property
    def aws_profile(self) -> str:
        """The profile that was set; '' means the default of the AWS configuration."""
        return self.profile or os.environ.get("AWS_PROFILE", "")

    @property
    def names_stack(self) -> bool:
        """Whether the user named a stack, which then has to exist."""
        return "stack" in self.model_fields_set

    @property
    def reaches_aws(self) -> bool:
        """Whether AWS is configured at all; if not, no command calls it."""
        if self.region or self.profile or self.names_stack or self.store.startswith("s3://"):
            return True
        if any(os.environ.get(name) for name in AWS_VARIABLES):
            return True
        files = (("AWS_CONFIG_FILE", "config"), ("AWS_SHARED_CREDENTIALS_FILE", "credentials"))
        return any(  # as boto3 reads them; users set /dev/null to name none
            os.path.isfile(os.path.expanduser(os.environ.get(name, f"~/.aws/{file}")))  # noqa: PTH111, PTH113
            for name, file in files
        )

    @property
    def local_store(self) -> str:
        return str(self.home / "store")

    @property
    def data_store(self) -> str:
        """The store that uploads go to."""
        return self.store or self.local_store

    @property
    def models_dir(self) -> Path:
        return self.home / "models"


def problem_of(location: str) -> str:
    """Why a URL cannot hold text, such as `s3://` from an unset variable, or ''."""
    scheme, _, rest = location.partition(":")
    if scheme == "s3":
        # Buckets from before 2018 may have capitals and underscores.
        if not re.match(r"//[A-Za-z0-9][A-Za-z0-9._-]{2,254}(/|$)", rest):
            return "names no bucket; use s3://bucket/prefix"
        if "//" in rest[2:]:  # a valid key, but SageMaker cannot read it
            return "has an empty part, //, which SageMaker cannot read"
    elif not location.startswith("file:///") and (rest[:2] == "//" or scheme in ("arn", "file")):
        how = " (download it first)" if scheme in ("http", "https") else ""
        return f"use s3://bucket/prefix or a local directory or file{how}"
    return ""


def load_settings(**given: str | None) -> Settings:
    """Load the settings; arguments override the environment and the config file.

    Raises InputError as Settings, and if a variable SM_NANOGPT_* is no setting, as a typo is not,
    or home cannot be written.
    """
    known = [f"{PREFIX}{name.upper()}" for name in Settings.model_fields]
    fine = {*known, "SM_NANOGPT_LAUNCHER"}  # the runner sets it for the training script
    for name, value in sorted(os.environ.items()):
        if value and name.upper().startswith(PREFIX) and name.upper() not in fine:
            meant = did_you_mean(name.upper(), known, limit=1, cutoff=0)
            raise InputError(f"{name}: there is no such setting; {meant}")
    words = {name: value for name, value in given.items() if value}
    if "store" in words and not ABSOLUTE.match(words["store"]):
        words["store"] = str(Path(words["store"]).absolute())  # relative to the current directory
    try:
        settings = Settings(**words)
        settings.home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{error.filename}: {error.strerror}; set SM_NANOGPT_HOME to another directory"
        ) from None
    return settings
