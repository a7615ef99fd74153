"""Where things are kept: command line, then SM_NANOGPT_*, then the config file, then defaults."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import fsspec
from pydantic import Field, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from launcher.errors import InputError


def default_home() -> Path:
    return Path(os.environ.get("SM_NANOGPT_HOME") or "~/.sm-nanogpt").expanduser()


class Settings(BaseSettings):
    """Places of this installation.

    home holds everything that is kept on this machine: jobs/, models/, cache/, config.toml, and
    store/ as long as no other store is set. store is `s3://bucket/prefix` or a local directory.
    """

    model_config = SettingsConfigDict(
        env_prefix="SM_NANOGPT_", env_ignore_empty=True, extra="forbid", frozen=True
    )

    home: Path = Field(default_factory=default_home)
    store: str = ""
    region: str = ""  # "": as the AWS configuration has it
    profile: str = ""
    role: str = ""  # ARN of the role that SageMaker acts as
    kms_key: str = ""  # encrypts what is put into S3; "": as the bucket has it

    @field_validator("home")
    @classmethod
    def _absolute(cls, home: Path) -> Path:
        return home.expanduser().absolute()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        file = TomlConfigSettingsSource(settings_cls, default_home() / "config.toml")
        return init_settings, env_settings, file

    @property
    def reaches_aws(self) -> bool:
        """Whether something says that AWS is in use; without it, no command makes a call there."""
        names = ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE")
        said = self.region or self.profile or any(os.environ.get(name) for name in names)
        return bool(said or self.store.startswith("s3://") or self.sagemaker_mark.exists())

    @property
    def sagemaker_mark(self) -> Path:
        """There since the first launch on SageMaker from here."""
        return self.home / "sagemaker-used"

    def export_aws(self) -> None:
        """Gives profile and region to boto3, s3fs and child processes by the variables all read."""
        if self.kms_key:
            encryption = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": self.kms_key}
            fsspec.config.conf["s3"] = {"s3_additional_kwargs": encryption}
        if self.profile:
            os.environ["AWS_PROFILE"] = self.profile
        if self.region:
            os.environ["AWS_REGION"] = os.environ["AWS_DEFAULT_REGION"] = self.region

    @property
    def local_store(self) -> str:
        return str(self.home / "store")

    @property
    def data_store(self) -> str:
        """Where uploads go."""
        return self.store or self.local_store

    @property
    def jobs_dir(self) -> Path:
        return self.home / "jobs"

    @property
    def models_dir(self) -> Path:
        return self.home / "models"

    @property
    def cache_dir(self) -> Path:
        return self.home / "cache"


def load_settings(**said: str | None) -> Settings:
    """The settings in force, with what the command line says over the rest.

    Raises:
        InputError: a value or the config file cannot be read, or home cannot be written.
    """
    try:
        settings = Settings(**{name: value for name, value in said.items() if value})  # type: ignore[arg-type]
        settings.home.mkdir(parents=True, exist_ok=True)
        settings.export_aws()
    except ValidationError as error:
        first = error.errors()[0]
        name = "_".join(str(part) for part in first["loc"])
        unknown = first["type"] == "extra_forbidden"
        reason = "there is no such setting" if unknown else first["msg"]
        raise InputError(f"setting {name}={first['input']!r}: {reason}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{default_home() / 'config.toml'}: not TOML: {error}") from None
    except OSError as error:
        raise InputError(
            f"{error.filename}: {error.strerror}; SM_NANOGPT_HOME names another directory to keep"
            " things in"
        ) from None
    return settings
