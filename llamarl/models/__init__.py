"""Models: a decoder from a Hugging Face config, over ranks or not, and directories in and out.

What the rest of the package asks of a model is `protocol.LanguageModel`. `build.Decoder` gives it,
over torchtune, which is named nowhere else; docs/models.md says how to add a family.
"""
