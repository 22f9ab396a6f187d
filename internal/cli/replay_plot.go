package cli

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"io"
	"math"
	"strconv"
)

// figure is a picture of panels side by side, with one legend for all.
type figure struct {
	// title and desc are read out to those who cannot see the picture; title is
	// also drawn above it.
	title, desc string
	panels      []panel
}

// panel is a system of axes with lines in it. The n-th lines of all panels look
// alike and have the name that the legend gives.
type panel struct {
	title string
	x, y  axis
	lines []line
	// guide is a line to compare the others with; its name is "" where there is
	// none.
	guide line
}

// axis is the range of an axis and what it measures.
type axis struct {
	label     string
	low, high float64
}

type line struct {
	name   string
	points []point
}

type point struct{ x, y float64 }

// palette has colours that the colour-blind tell apart, from Okabe and Ito, the
// yellow replaced by a colour that shows on white. Dashes tell them apart in
// grey.
var palette = []struct{ colour, dash string }{
	{"#0072b2", ""}, {"#d55e00", "7 3"}, {"#009e73", "2 2"}, {"#cc79a7", "9 3 2 3"},
	{"#e69f00", "12 4"}, {"#56b4e9", "4 2"}, {"#882255", "1 3"}, {"#000000", "9 3 2 3 2 3"},
}

// Sizes in pixels.
const (
	panelWidth, panelHeight  = 400.0, 300.0
	marginLeft, marginRight  = 64.0, 20.0
	marginTop, marginBottom  = 76.0, 52.0
	legendRow, legendItem    = 20.0, 150.0
	tickLength, tickDistance = 5.0, 60.0
)

// writeTo writes the figure as SVG. The same figure gives the same bytes.
func (f *figure) writeTo(w io.Writer) error {
	var legend []line
	for _, p := range f.panels {
		if len(p.lines) > len(legend) {
			legend = p.lines
		}
	}
	slot := marginLeft + panelWidth + marginRight
	width := slot * float64(len(f.panels))
	columns := max(1, int((width-marginLeft)/legendItem))
	guide := ""
	for _, p := range f.panels {
		if p.guide.name != "" {
			guide = p.guide.name
		}
	}
	entries := len(legend)
	if guide != "" {
		entries++
	}
	rows := (entries + columns - 1) / columns
	height := marginTop + panelHeight + marginBottom + legendRow*float64(rows) + 10

	s := &svg{}
	s.printf(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %s %s" width="%s" height="%s" role="img" aria-labelledby="title desc" font-family="sans-serif" font-size="12" fill="#222">`,
		px(width), px(height), px(width), px(height))
	s.printf(`<title id="title">%s</title>`, escape(f.title))
	s.printf(`<desc id="desc">%s</desc>`, escape(f.desc))
	s.printf(`<rect width="%s" height="%s" fill="#fff"/>`, px(width), px(height))
	s.text(marginLeft, 26, "start", `font-size="16"`, f.title)
	for i := range f.panels {
		s.printf(`<g transform="translate(%s %s)">`, px(slot*float64(i)+marginLeft), px(marginTop))
		s.panel(&f.panels[i])
		s.printf(`</g>`)
	}
	for i := range entries {
		x := marginLeft + legendItem*float64(i%columns)
		y := marginTop + panelHeight + marginBottom + legendRow*float64(i/columns) + 8
		name, style := guide, guideStyle
		if i < len(legend) {
			name, style = legend[i].name, lineStyle(i)
		}
		s.printf(`<path d="M%s %sh26" %s/>`, px(x), px(y), style)
		s.text(x+32, y+4, "start", "", name)
	}
	s.printf(`</svg>`)
	_, err := w.Write(s.Bytes())
	return err
}

// guideStyle is how guides look.
const guideStyle = `fill="none" stroke="#999" stroke-width="1"`

// lineStyle is how the n-th lines look.
func lineStyle(n int) string {
	look := palette[n%len(palette)]
	style := fmt.Sprintf(`fill="none" stroke="%s" stroke-width="1.8" stroke-linejoin="round"`, look.colour)
	if look.dash != "" {
		style += fmt.Sprintf(` stroke-dasharray="%s"`, look.dash)
	}
	return style
}

// svg collects the lines of a picture.
type svg struct{ bytes.Buffer }

func (s *svg) printf(format string, args ...any) { fmt.Fprintf(s, format+"\n", args...) }

func (s *svg) text(x, y float64, anchor, style, text string) {
	if style != "" {
		style = " " + style
	}
	s.printf(`<text x="%s" y="%s" text-anchor="%s"%s>%s</text>`, px(x), px(y), anchor, style, escape(text))
}

// panel draws a panel with its upper left corner at the origin.
func (s *svg) panel(p *panel) {
	x := func(v float64) float64 { return panelWidth * (v - p.x.low) / (p.x.high - p.x.low) }
	y := func(v float64) float64 { return panelHeight * (1 - (v-p.y.low)/(p.y.high-p.y.low)) }
	s.text(panelWidth/2, -12, "middle", `font-size="13"`, p.title)
	for _, t := range p.x.ticks(panelWidth) {
		s.printf(`<path d="M%s %sv%s" stroke="#ddd"/>`, px(x(t)), px(0), px(panelHeight))
		s.printf(`<path d="M%s %sv%s" stroke="#222"/>`, px(x(t)), px(panelHeight), px(tickLength))
		s.text(x(t), panelHeight+18, "middle", "", number(t))
	}
	for _, t := range p.y.ticks(panelHeight) {
		s.printf(`<path d="M0 %sh%s" stroke="#ddd"/>`, px(y(t)), px(panelWidth))
		s.printf(`<path d="M0 %sh%s" stroke="#222"/>`, px(y(t)), px(-tickLength))
		s.text(-8, y(t)+4, "end", "", number(t))
	}
	s.text(panelWidth/2, panelHeight+38, "middle", "", p.x.label)
	s.text(0, 0, "middle", fmt.Sprintf(`transform="translate(-44 %s) rotate(-90)"`, px(panelHeight/2)), p.y.label)
	s.printf(`<rect width="%s" height="%s" fill="none" stroke="#222"/>`, px(panelWidth), px(panelHeight))
	if p.guide.name != "" {
		s.line(p, p.guide, guideStyle, x, y)
	}
	for i, l := range p.lines {
		s.line(p, l, lineStyle(i), x, y)
	}
}

// line draws the points of a line that lie within the axes.
func (s *svg) line(p *panel, l line, style string, x, y func(float64) float64) {
	var d bytes.Buffer
	command := "M"
	for _, at := range l.points {
		if !p.x.has(at.x) || !p.y.has(at.y) {
			continue
		}
		fmt.Fprintf(&d, "%s%s %s", command, px(x(at.x)), px(y(at.y)))
		command = "L"
	}
	if d.Len() > 0 {
		s.printf(`<path d="%s" %s><title>%s</title></path>`, d.String(), style, escape(l.name))
	}
}

func (a axis) has(v float64) bool { return v >= a.low && v <= a.high }

// ticks returns the round numbers to mark on an axis of a length in pixels:
// multiples of 1, 2 or 5 times a power of ten.
func (a axis) ticks(length float64) []float64 {
	least := (a.high - a.low) * tickDistance / length
	power := math.Pow(10, math.Floor(math.Log10(least)))
	step := 10 * power
	for _, m := range []float64{1, 2, 5} {
		if m*power >= least*(1-1e-9) {
			step = m * power
			break
		}
	}
	var ticks []float64
	for n := math.Ceil(a.low/step - 1e-9); n*step <= a.high+step*1e-9; n++ {
		ticks = append(ticks, n*step)
	}
	return ticks
}

// px writes a length to a tenth of a pixel.
func px(v float64) string { return number(math.Round(v*10) / 10) }

// number writes a number without more digits than it needs.
func number(v float64) string {
	v = math.Round(v*1e6) / 1e6
	if v == 0 {
		v = 0 // not -0
	}
	return strconv.FormatFloat(v, 'f', -1, 64)
}

func escape(text string) string {
	var b bytes.Buffer
	_ = xml.EscapeText(&b, []byte(text)) // a Buffer does not fail
	return b.String()
}
