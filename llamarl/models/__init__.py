"""Models: torchtune's decoder from a Hugging Face config, and Hugging Face directories in and out.
Torchtune is named nowhere else.
"""
