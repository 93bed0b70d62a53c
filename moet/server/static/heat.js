// The routed experts as a heat map: a row per layer, a column per expert, the hotter the more rows.
// Experts that are not on the tier that computes are drawn blue, the others orange.

const number = new Intl.NumberFormat("en");

export class HeatMap {
  constructor(canvas, note, hint) {
    this.canvas = canvas;
    this.note = note;
    this.hint = hint;
    this.layers = [];
    canvas.addEventListener("mousemove", (event) => this.point(event));
    canvas.addEventListener("mouseleave", () => (hint.textContent = ""));
  }

  show(stats) {
    this.layers = stats.layers;
    if (!this.layers.length) {
      this.note.textContent = "nothing routed yet";
      this.canvas.style.height = "0";
      return;
    }
    const columns = Math.max(...this.layers.map((layer) => layer.rows.length));
    this.canvas.width = columns;
    this.canvas.height = this.layers.length;
    this.canvas.style.height = `${this.layers.length * Math.max(6, Math.min(22, 300 / this.layers.length))}px`;
    const pen = this.canvas.getContext("2d");
    const image = pen.createImageData(columns, this.layers.length);
    this.layers.forEach((layer, y) => {
      const top = Math.log1p(Math.max(1, ...layer.rows));
      layer.rows.forEach((rows, x) => {
        const heat = Math.log1p(rows) / top;
        const [red, green, blue] = layer.resident[x] ? [240, 120, 40] : [60, 130, 240];
        image.data.set([red, green, blue, 25 + 230 * heat], 4 * (y * columns + x));
      });
    });
    pen.putImageData(image, 0, 0);
    const resident = this.layers.reduce((sum, layer) => sum + layer.num_resident, 0);
    const total = this.layers.reduce((sum, layer) => sum + layer.rows.length, 0);
    this.note.textContent = `${this.layers.length} layers, ${number.format(resident)} of ${number.format(total)} experts resident`;
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    const layer = this.layers[Math.floor(((event.clientY - box.top) / box.height) * this.layers.length)];
    const expert = Math.floor(((event.clientX - box.left) / box.width) * this.canvas.width);
    if (layer === undefined || layer.rows[expert] === undefined) return;
    const where = layer.resident[expert] ? `resident as ${layer.format}` : "not resident";
    this.hint.textContent = `layer ${layer.layer}, expert ${expert}: ${number.format(layer.rows[expert])} rows, ${where}`;
  }
}
