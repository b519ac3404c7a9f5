"""Tests of the transfer package."""
