"""Bytes and documents, on this machine and on S3."""
