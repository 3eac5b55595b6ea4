"""Choosing for the user: is time signal or noise, what does each layer lose and gain, and which policy is the fastest."""
