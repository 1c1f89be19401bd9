// Making and changing elements. Live updates touch only what differs, so that focus, selection and hover stay.

const SVG = "http://www.w3.org/2000/svg";

/** A new element: h("a", {href, class, "data-x", onclick}, ...children); null children are left out. */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function svg(tag, props = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(props)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export const byId = (id) => document.getElementById(id);

/** Writes text only when it differs. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function mark(element, name, value) {
  if (value === null || value === undefined || value === false) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

/** A symbol of the icon file, hidden from screen readers: the word beside it says the same. */
export function icon(name) {
  return svg("svg", { class: "icon", viewBox: "0 0 16 16", "aria-hidden": "true" }, svg("use", { href: `/static/icons.svg#${name}` }));
}

/**
 * Makes the children of `parent` show `items` in order: new ones by `create(item)`, all by `update(element, item)`.
 * An element lives as long as its key does.
 */
export function keyed(parent, items, keyOf, create, update) {
  const known = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    let element = known.get(key);
    if (element === undefined) {
      element = create(item);
      element.dataset.key = key;
    }
    known.delete(key);
    update?.(element, item);
    if (element === place) place = place.nextElementSibling;
    else parent.insertBefore(element, place);
  }
  for (const gone of known.values()) gone.remove();
}

/** A row whose cells carry their column's name, which narrow screens show. `wide`: columns that take the full width there. */
export function row(table, wide = []) {
  const heads = [...table.tHead.rows[0].cells];
  return h("tr", {}, ...heads.map((head, index) =>
    h("td", { class: head.className || null, "data-label": head.textContent, "data-wide": wide.includes(index) })));
}

/** Sets a definition list to [name, text or node] pairs. */
export function facts(list, pairs) {
  const children = pairs.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]);
  list.replaceChildren(...children);
}
