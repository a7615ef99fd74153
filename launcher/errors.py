"""The two ways in which a command fails."""

from __future__ import annotations


class InputError(Exception):
    """What the user said or gave cannot be used: exit code 2. The text says what to do instead."""


class ServiceError(Exception):
    """A job, a store or a service failed: exit code 1. The text says what to do next."""
