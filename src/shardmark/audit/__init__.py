"""Audits an unchanged training script: is what it trains on N ranks what one process trains?"""
