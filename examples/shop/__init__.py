"""A small shop: orders and payments from Kafka; a join, sessions and totals; Delta, PostgreSQL and Kafka out."""
