// Requests to the server. A change carries a header that no other page can send.

const ANSWER_MS = 60_000;

/** A refusal: its code, what happened, and what to do next. */
export class Refused extends Error {
  constructor(error) {
    super(error.what);
    this.code = error.code;
    this.remedy = error.remedy;
    this.where = error.where ?? {};
  }
  get line() {
    const place = Object.entries(this.where)
      .map(([name, value]) => `${name}=${value}`)
      .join(" ");
    return `${this.code}: ${this.message}${place ? ` (${place})` : ""}${this.remedy ? `: ${this.remedy}` : ""}`;
  }
}

async function answered(answer) {
  const found = await answer.json().catch(() => ({
    error: { code: "no_answer", what: `the page's server answered ${answer.status}`, remedy: "reload the page" },
  }));
  if (found.error) throw new Refused(found.error);
  return found;
}

async function asked(path, options) {
  let answer;
  try {
    answer = await fetch(path, { ...options, signal: AbortSignal.timeout(ANSWER_MS) });
  } catch (error) {
    if (error.name === "TimeoutError")
      throw new Refused({
        code: "no_answer",
        what: `the page's server has not answered within ${ANSWER_MS / 1000} s, and may still do what was asked`,
        remedy: "close other tabs of this page, and look at its state before you try again",
      });
    throw new Refused({
      code: "no_answer",
      what: "the page's server does not answer",
      remedy: "check that `stateflow dashboard` is running",
    });
  }
  return answered(answer);
}

export const get = (name, query) => asked(`api/${name}${query ? `?${new URLSearchParams(query)}` : ""}`);
export const post = (name, body) =>
  asked(`api/${name}`, {
    method: "POST",
    headers: { "x-stateflow": "1", "content-type": "application/json" },
    body: typeof body === "string" ? body : JSON.stringify(body),
  });
