# Copyright (c) the d2_memfit developers.
"""A check of what works with a job, made by two small iterations on the CPU."""

from .examination import Finding, answer_of_findings, examine, examine_runs

__all__ = ["Finding", "answer_of_findings", "examine", "examine_runs"]
