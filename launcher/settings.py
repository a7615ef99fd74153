"""Read the settings: from the command line, SM_NANOGPT_* variables, config.toml, or defaults."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Container, Iterable
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

from sm_nanogpt.entry_point.errors import os_reason
from sm_nanogpt.launcher.errors import InputError, did_you_mean, rephrased
from sm_nanogpt.launcher.locations import expand_user, file_at, is_on_s3, location_problem
from sm_nanogpt.launcher.values import plain


def default_home() -> Path:
    return expand_user(os.environ.get("SM_NANOGPT_HOME") or "~/.sm-nanogpt")


def config_file() -> Path:
    return default_home() / "config.toml"


VARIABLE_PREFIX = "SM_NANOGPT_"
LAUNCHER_VARIABLE = "SM_NANOGPT_LAUNCHER"  # no setting: the runner sets it for train.py

# The beginning of a location that does not depend on the current directory.
ABSOLUTE_LOCATION = re.compile(r"/|~|s3:|file:|arn:|[\w.+-]+://")

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
        env_prefix=VARIABLE_PREFIX, env_ignore_empty=True, extra="forbid", frozen=True
    )

    home: Path = Field(default_factory=default_home)
    store: str = ""
    region: str = ""  # "": from the AWS configuration
    profile: str = ""
    role: str = ""  # ARN of the execution role
    # The name of the stack whose outputs have store and role.
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
            raise invalid_setting_error(error, arguments=values) from None
        except SettingsError as error:
            raise no_json_error(error) from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InputError(f"{config_file()}: not TOML: {error}") from None

    @field_validator("store")
    @classmethod
    def _is_usable(cls, store: str) -> str:
        problem = location_problem(store)
        if store and not ABSOLUTE_LOCATION.match(store):
            problem = "is relative to the current directory; start it with / or ~/"
        file = None if problem else file_at(store)
        if file is not None:
            problem = f"{file} is a file; give a directory or an S3 prefix"
        if problem:
            raise ValueError(problem)
        return store

    @field_validator("role")
    @classmethod
    def _is_arn(cls, role: str) -> str:
        if role and not re.fullmatch(r"arn:aws[a-z-]*:iam::\d{12}:role/.+", role):
            raise ValueError("must be an ARN, arn:aws:iam::ACCOUNT:role/NAME")
        return role

    @field_validator("home")
    @classmethod
    def _make_absolute(cls, home: Path) -> Path:
        return expand_user(home).absolute()

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], *_: Any, **sources: Any
    ) -> tuple[Any, ...]:
        toml_file = None
        with suppress(InputError):  # without a home directory there is no file
            toml_file = config_file()
        toml = TomlConfigSettingsSource(settings_cls, toml_file)
        return sources["init_settings"], sources["env_settings"], toml

    def with_offline(self, offline: bool) -> Settings:
        """Return a copy that may not call AWS, for a dry run (True), or that may (False)."""
        copy = self.model_copy()
        copy._offline = offline
        return copy

    @property
    def offline(self) -> bool:
        """True in a dry run, in which aws.make_client and files.storage raise Offline."""
        return self._offline

    @property
    def aws_region(self) -> str:
        """The region of the settings or of AWS_REGION; '': that of the AWS configuration."""
        return self.region or os.environ.get("AWS_REGION", "")

    @property
    def aws_profile(self) -> str:
        """The profile of the settings or of AWS_PROFILE; '': the default of AWS."""
        return self.profile or os.environ.get("AWS_PROFILE", "")

    @property
    def names_stack(self) -> bool:
        """True if the user named a stack, which then has to exist."""
        return "stack" in self.model_fields_set

    @property
    def reaches_aws(self) -> bool:
        """True if AWS is configured in any way. If it is not, no command calls it."""
        if self.region or self.profile or self.names_stack or is_on_s3(self.store):
            return True
        if any(os.environ.get(name) for name in AWS_VARIABLES):
            return True
        return has_aws_file("AWS_CONFIG_FILE", "~/.aws/config") or has_aws_file(
            "AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"
        )

    @property
    def local_store(self) -> str:
        return str(self.home / "store")

    @property
    def data_store(self) -> str:
        """The store of uploads."""
        return self.store or self.local_store

    @property
    def models_dir(self) -> Path:
        return self.home / "models"


def invalid_setting_error(error: ValidationError, arguments: Container[str]) -> InputError:
    """The error for a setting that pydantic refused.

    If the setting is not among the arguments, it came from a variable or from config.toml.
    """
    details = error.errors()[0]
    name = str(details["loc"][0])
    value = details["input"]
    if details["type"] == "extra_forbidden":
        problem = unknown_setting_problem(name.lower(), Settings.model_fields)
    else:
        problem = rephrased(details["msg"])
    if name in arguments:
        return InputError(problem, field=name, value=value)
    sources = f"{VARIABLE_PREFIX}{name.upper()}, or in {config_file()}"
    return InputError(f"{name}={value!r} ({sources}): {problem}")


def no_json_error(error: SettingsError) -> InputError:
    """The error for a variable that should be JSON, of a list or a dictionary, and is not."""
    match = re.search(r'field "(\w+)"', str(error))
    variable = str(error)
    if match:
        variable = f"{VARIABLE_PREFIX}{match[1].upper()}"
    return InputError(f'{variable}: must be JSON, as ["a", "b"] or {{"a": "b"}}')


def unknown_setting_problem(name: str, names: Iterable[str]) -> str:
    return f"there is no such setting; {did_you_mean(name, names, limit=1, cutoff=0)}"


def has_aws_file(variable: str, default: str) -> bool:
    """True if a file of the AWS configuration exists. A user may set it to /dev/null."""
    path = os.environ.get(variable, default)
    return os.path.isfile(os.path.expanduser(path))  # noqa: PTH111, PTH113  (as boto3 reads it)


def load_settings(**arguments: str | None) -> Settings:
    """Load the settings. An argument that is not empty overrides the environment and config.toml.

    Raises InputError as Settings does, if home cannot be written, and if a variable SM_NANOGPT_* is
    no setting, such as a typo.
    """
    check_variables()
    values = {name: value for name, value in arguments.items() if value}
    store = values.get("store")
    if store and not ABSOLUTE_LOCATION.match(store):
        values["store"] = str(Path(store).absolute())  # relative to the current directory
    try:
        settings = Settings(**values)
        settings.home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{error.filename}: {os_reason(error)}; set SM_NANOGPT_HOME to another directory"
        ) from None
    return settings


def check_variables() -> None:
    """Raise InputError if an environment variable SM_NANOGPT_* is no setting."""
    names = [f"{VARIABLE_PREFIX}{name.upper()}" for name in Settings.model_fields]
    for variable, value in sorted(os.environ.items()):
        name = variable.upper()
        if value and name.startswith(VARIABLE_PREFIX) and name not in (*names, LAUNCHER_VARIABLE):
            raise InputError(f"{variable}: {unknown_setting_problem(name, names)}")
