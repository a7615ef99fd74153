"""From a job to text: fetch, load, encode, sample."""
