"""Models: a decoder from a Hugging Face config, over ranks or not, and directories in and out.

What the rest of the package asks of a model is `decoder.Decoder`; docs/models.md says how to add a
family.
"""
