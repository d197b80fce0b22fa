"""Tests of the package models."""
