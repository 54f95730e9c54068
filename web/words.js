// Every word the page shows, in English and Chinese. An element takes its text from data-text, its accessible name from
// data-label, its placeholder from data-placeholder.
const words = {
  en: {
    skip: "Skip to the message", fresh: "New chat", language: "Language", conversation: "Conversation", documents: "Documents",
    welcome: "Ask something, or drop a long text here and ask about it. The text is read once; later questions go on from the cache.",
    prompt: "Message", promptHint: "Your message (Enter sends, Shift+Enter breaks the line)", attach: "Add a document", send: "Send",
    stop: "Stop", again: "Answer again", you: "You", model: "DeepTutor", copy: "Copy", copied: "Copied", remove: "Remove {name}",
    drop: "Drop the text here", tlcTitle: "What the cache keeps", evict: "Eviction", preset: "Preset", reading: "Reading",
    writing: "Writing", tokens: "Tokens", reused: "Reused", memory: "Cache memory", layer: "Layer", kept: "Kept",
    strip: "Where in the text", stripHint: "One row a layer, from the beginning of the conversation (left) to its end: the darker, the more of it is kept.",
    layersEmpty: "Appears with the first answer.", settings: "Settings", system: "Instructions for the model",
    temperature: "Temperature", maxTokens: "Longest answer, in tokens", key: "API key", perSecond: "{n} tokens/s",
    ofFull: "{now} of {full}", ofPrompt: "{n} of {all}", keeps: "Layer {layer} keeps {n} of {all} tokens",
    meter: "{percent} % of what the full cache would take", readingNow: "Reading: {n} of {all} tokens", writingNow: "Writing…",
    stopped: "Stopped.", cutShort: "The answer reached its longest length.", failed: "That did not work: {why}",
    gone: "The server does not answer. Is it still running?", badKey: "the key has characters that no request can carry; copy it again", busy: "The server is busy; it asks to try again in {n} seconds.",
    notText: "{name} is not a text file.", unsaved: "This conversation is too long for the browser to keep over a reload.",
    keptInTab: "The browser has room to keep this conversation until the tab is closed, no longer.",
    changed: "A change here makes the server read the conversation anew.", fixed: "The server does not let requests change this.",
    noServer: "The server's settings could not be read.",
  },
  zh: {
    skip: "跳到输入框", fresh: "新对话", language: "语言", conversation: "对话", documents: "文档",
    welcome: "直接提问，或把一篇长文拖到这里再提问。长文只读一次，之后的问题都接着缓存继续。",
    prompt: "消息", promptHint: "输入消息（回车发送，Shift+回车换行）", attach: "添加文档", send: "发送",
    stop: "停止", again: "重新回答", you: "你", model: "DeepTutor", copy: "复制", copied: "已复制", remove: "移除 {name}",
    drop: "把文本拖到这里", tlcTitle: "缓存保留了什么", evict: "缓存淘汰", preset: "预设", reading: "读取速度",
    writing: "生成速度", tokens: "词元数", reused: "复用", memory: "缓存内存", layer: "层", kept: "保留",
    strip: "在文中的位置", stripHint: "每层一行，从对话开头（左）到结尾（右）：颜色越深，保留得越多。",
    layersEmpty: "第一次回答后显示。", settings: "设置", system: "给模型的指示",
    temperature: "温度", maxTokens: "回答的最大词元数", key: "API 密钥", perSecond: "{n} 词元/秒",
    ofFull: "{now}，完整缓存需 {full}", ofPrompt: "{n} / {all}", keeps: "第 {layer} 层保留 {all} 个词元中的 {n} 个",
    meter: "占完整缓存的 {percent}%", readingNow: "正在读取：{n} / {all} 词元", writingNow: "正在生成…",
    stopped: "已停止。", cutShort: "回答已达最大长度。", failed: "出错了：{why}",
    gone: "服务器没有响应。它还在运行吗？", badKey: "密钥含有请求无法携带的字符，请重新复制", busy: "服务器繁忙，请在 {n} 秒后重试。",
    notText: "{name} 不是文本文件。", unsaved: "对话太长，浏览器无法在刷新后保留。",
    keptInTab: "浏览器的存储空间不足，此对话只保留到关闭标签页为止。",
    changed: "更改后服务器会重新读取整个对话。", fixed: "服务器不允许请求更改此设置。",
    noServer: "无法读取服务器的设置。",
  },
};

let language = "en";

export function say(name, values = {}) {
  return words[language][name].replace(/\{(\w+)\}/g, (whole, key) => (key in values ? values[key] : whole));
}

export function chosenLanguage() { return language; }

export function useLanguage(wanted) {
  language = wanted in words ? wanted : "en";
  document.documentElement.lang = language === "zh" ? "zh-CN" : "en";
  for (const element of document.querySelectorAll("[data-text]")) element.textContent = say(element.dataset.text);
  for (const element of document.querySelectorAll("[data-label]")) element.setAttribute("aria-label", say(element.dataset.label));
  for (const element of document.querySelectorAll("[data-placeholder]")) element.placeholder = say(element.dataset.placeholder);
}

export function number(n) { return Math.round(n).toLocaleString(language === "zh" ? "zh-CN" : "en"); }

export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  for (; n >= 1024 && i < units.length - 1; i++) n /= 1024;
  return `${n.toLocaleString(language === "zh" ? "zh-CN" : "en", { maximumFractionDigits: n < 10 && i > 0 ? 1 : 0 })} ${units[i]}`;
}
