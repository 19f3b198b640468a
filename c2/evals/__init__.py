"""Evaluations: functions of a scoring function, without a model of their own."""
