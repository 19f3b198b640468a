"""The engine behind HTTP, as OpenAI's API: for agents, evals and trainers elsewhere.

    app = create_app(engine, tokenizer, ServerConfig(model="policy"), chat=chat)
    uvicorn.run(app)

`app` says what paths there are, `protocol` what a request may hold, `answers` what comes back.
Needs the extra `serve`, `config` aside.
"""
