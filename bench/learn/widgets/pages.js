// The rules of engine/block_manager.py.  A sequence is {tokens, pages, contents, computed}.
rooflab.Pages = class {
  constructor(count, size) {
    const free = [...Array(count).keys()].reverse();
    Object.assign(this, { size, free, evicted: 0, made: 0, cached: new Set(), published: new Map(), keys: new Map() });
    this.holders = free.map(() => 0);
  }
  get numFree() { return this.free.length + this.cached.size; }
  key(one, at) { return `${one.contents[at - 1] ?? 0}:${one.tokens.slice(at * this.size, (at + 1) * this.size)}`; }
  reuse(one) {
    const most = Math.floor((one.tokens.length - 1) / this.size);
    for (let found; one.pages.length < most && (found = this.published.get(this.key(one, one.pages.length)));) {
      this.cached.delete(found.page);
      this.holders[found.page]++;
      one.pages.push(found.page);
      one.contents.push(found.content);
    }
    one.computed = one.pages.length * this.size;
  }
  grow(one, tokens) {
    const missing = Math.ceil(tokens / this.size) - one.pages.length;
    if (missing > this.numFree) return false;
    for (let i = 0; i < missing; i++) {
      const page = this.free.pop() ?? this.evict();
      this.holders[page] = 1;
      one.pages.push(page);
    }
    return true;
  }
  evict() { // gives away the page that was cached first
    const [page] = this.cached;
    this.cached.delete(page);
    this.published.delete(this.keys.get(page));
    this.keys.delete(page);
    this.evicted++;
    return page;
  }
  publish(one, computed) {
    for (let at = one.contents.length; at < Math.floor(computed / this.size); at++) {
      const [key, page] = [this.key(one, at), one.pages[at]];
      if (!this.published.has(key)) {
        this.published.set(key, { content: ++this.made, page });
        this.keys.set(page, key);
      }
      one.contents.push(this.published.get(key).content);
    }
  }
  release(one) {
    for (const page of one.pages.reverse()) {
      if (--this.holders[page] === 0) this.keys.has(page) ? this.cached.add(page) : this.free.push(page);
    }
    Object.assign(one, { pages: [], contents: [], computed: 0 });
  }
};

rooflab.widget("pages", [], (root) => {
  const [pages, running, state] = [new rooflab.Pages(8, 4), [], { said: "All 8 pages are free." }];
  let made = 0;
  const start = (shared) => {
    const one = { name: "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[made++ % 26], pages: [], contents: [] };
    one.tokens = [...Array(10).keys()].map((i) => `${shared && i < 8 ? "shared" : made}.${i}`);
    pages.reuse(one);
    if (!pages.grow(one, 10)) {
      pages.release(one);
      return `Too few pages are free: ${one.name} must wait for the end of another sequence.`;
    }
    pages.publish(one, 10);
    running.push(one);
    return `${one.name} runs.`;
  };
  const decode = () => {
    let said = "Each sequence has one more token.";
    for (const one of [...running]) {
      while (running.includes(one) && !pages.grow(one, one.tokens.length + 1)) {
        const last = running.pop();
        pages.release(last);
        said = `${last.name} came last. It is preempted: it loses its pages.`;
      }
      if (running.includes(one)) pages.publish(one, one.tokens.push(`${made}.${one.name}${one.tokens.length}`) - 1);
    }
    return said;
  };
  const end = () => {
    const one = running.shift();
    if (one) pages.release(one);
    return one ? `${one.name} has ended. Its full pages stay cached.` : "No sequence runs.";
  };
  const acts = [["start: 8 tokens that others have", () => start(true)], ["start: a new text", () => start(false)],
    ["one token for each", decode], ["end the first", end]];
  const buttons = acts.map(([text, act]) => (show) => rooflab.button(text, () => { state.said = act(); show(); }));
  rooflab.panel(root, state, buttons, ({ said }) => {
    const names = (page) => running.filter((one) => one.pages.includes(page)).map((one) => one.name).join(" and ");
    return [`${said} Cached pages given away so far: ${pages.evicted}.`,
      rooflab.chips(pages.holders.map((_, page) =>
        [names(page) || (pages.cached.has(page) ? "cached" : "free"), `page ${page}`])),
      rooflab.table("Block tables; a page has 4 tokens",
        ["sequence", "tokens", "its pages", "tokens not computed again"],
        running.map((one) => [one.name, one.tokens.length, one.pages.join(", "), one.computed]))];
  });
});
