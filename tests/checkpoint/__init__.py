"""Tests of the weight log."""
